"""The input: parquet or JSON Lines, one file, a folder of them, or a glob; or OpenAI's batch format.

Here it is found and checked, by names and schemas only; `parts` reads its rows.
"""

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import InputError
from tasks.spec import Batch

_FORMATS: dict[str, Literal["parquet", "jsonl"]] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}

_LOOKED_AT_LINES = 20
"""Of a JSON Lines file, to learn its columns: the first line alone may lack one that is optional."""


@dataclass(frozen=True)
class InputFile:
    """One file of the input."""

    path: Path
    format: Literal["parquet", "jsonl"]


@dataclass(frozen=True)
class InputDescription:
    """What the input is, as far as names and schemas tell."""

    files: tuple[InputFile, ...]
    """In the order in which they are read."""
    columns: tuple[str, ...]
    """Those that every file has."""


def check(batch: Batch) -> InputDescription:
    """Find the input and check its columns, without reading rows.

    Raises:
        InputError: names `batch.input`, `batch.id`, `batch.prompt` or `batch.messages`, and the columns
        that exist.
    """
    files = _files(batch.input)
    common: list[str] | None = None
    for file in files:
        columns = _columns(file, batch)
        common = [name for name in common if name in columns] if common is not None else columns
    assert common is not None, "_files returns at least one"
    for field, column in wanted(batch).items():
        if column not in common:
            raise InputError(
                f"batch.{field}: there is no column {column!r} in {batch.input}; its columns are "
                f"{', '.join(common) or '(none that all files have)'}"
            )
    return InputDescription(tuple(files), tuple(common))


def wanted(batch: Batch) -> dict[str, str]:
    """Fields of the spec, and the columns that must be there because of them."""
    if batch.format == "openai_batch":
        columns = {"id": "custom_id", "format": "body", "session": batch.session}
    else:
        names = ("id", "prompt", "messages", "session", "row_sampling", "row_schema")
        columns = {name: getattr(batch, name) for name in names}
    return {field: column for field, column in columns.items() if column is not None}


def _files(place: str) -> list[InputFile]:
    path = Path(place)
    if glob.has_magic(place) and not path.exists():
        found = [Path(name) for name in glob.glob(place, recursive=True)]
    elif path.is_dir():
        found = [entry for entry in path.iterdir() if not entry.name.startswith((".", "_"))]
    elif path.exists():
        found = [path]
    else:
        raise InputError(f"batch.input: there is no file or folder {place}")
    files = [
        InputFile(entry.absolute(), _FORMATS[entry.suffix])
        for entry in sorted(found)
        if entry.suffix in _FORMATS and entry.is_file()
    ]
    if not files:
        raise InputError(
            f"batch.input: {place} holds no file that ends in {', '.join(_FORMATS)}; prompts are read from "
            f"parquet or JSON Lines"
        )
    return files


def _columns(file: InputFile, batch: Batch) -> list[str]:
    if file.format == "parquet":
        if batch.format == "openai_batch":
            raise InputError(f"batch.format: openai_batch is JSON Lines, and {file.path} is parquet")
        try:
            schema = pq.read_schema(file.path)
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"batch.input: {file.path} cannot be read as parquet: {error}") from None
        _check_id_type(schema, file, batch)
        return list(schema.names)
    columns: dict[str, None] = {}
    for _, document in islice(json_documents(file.path), _LOOKED_AT_LINES):
        columns.update(dict.fromkeys(document))
    if not columns:
        raise InputError(f"batch.input: {file.path} holds no rows")
    return list(columns)


def _check_id_type(schema: pa.Schema, file: InputFile, batch: Batch) -> None:
    if batch.id not in schema.names:
        return
    kind = schema.field(batch.id).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise InputError(
            f"batch.id: column {batch.id!r} of {file.path} is of type {kind}; an id is a text or an integer"
        )


def json_documents(
    path: Path, offset: int = 0, first: int = 0, lines: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in a JSON Lines file, with the numbers of their lines, from 1.

    Args:
        offset: bytes of the file that are skipped, which hold `first` lines.
        lines: how many lines are read; None: all.

    Raises:
        InputError: a line is not a JSON object, or too deep a one.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for number, line in enumerate(islice(file, lines), start=first + 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except ValueError as error:
                raise InputError(f"batch.input: line {number} of {path} is not JSON: {error}") from None
            except RecursionError:
                raise InputError(f"batch.input: line {number} of {path} is nested too deeply") from None
            if not isinstance(document, dict):
                raise InputError(f"batch.input: line {number} of {path} is not a JSON object")
            yield number, document
