"""The input: parquet or JSON Lines, one file, a folder of them, or a glob; or OpenAI's batch format.

`check` looks at names and schemas only; `read` streams the rows in a fixed order (files by name, rows as they
stand), so that two readings number them alike.
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

_READ_ROWS = 1024


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


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row as it stands in the input."""

    id: str | int | None
    text: Any
    """Of the column `prompt` or `messages`; None when the row has none. With `openai_batch`: the request."""
    place: str
    """File and row, for messages to people."""
    session: str | int | None = None
    sampling: Any = None
    """Of the column `row_sampling`."""
    schema: Any = None
    """Of the column `row_schema`."""


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
    for field, column in _wanted(batch).items():
        if column not in common:
            raise InputError(
                f"batch.{field}: there is no column {column!r} in {batch.input}; its columns are "
                f"{', '.join(common) or '(none that all files have)'}"
            )
    return InputDescription(tuple(files), tuple(common))


def read(batch: Batch, description: InputDescription) -> Iterator[InputRow]:
    """The rows, one after the other; memory stays flat.

    Raises:
        InputError: a file changed its columns or holds a line that is not a JSON object.
    """
    for file in description.files:
        rows = _parquet_rows(file.path, batch) if file.format == "parquet" else _json_rows(file.path, batch)
        yield from rows


def _wanted(batch: Batch) -> dict[str, str]:
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
    for _, document in islice(_json_documents(file.path), _LOOKED_AT_LINES):
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


def _parquet_rows(path: Path, batch: Batch) -> Iterator[InputRow]:
    wanted = _wanted(batch)
    text = batch.prompt or batch.messages or ""
    number = 0
    with pq.ParquetFile(path) as file:
        for part in file.iter_batches(batch_size=_READ_ROWS, columns=list(dict.fromkeys(wanted.values()))):
            columns = {name: part.column(name).to_pylist() for name in part.schema.names}
            nothing = [None] * part.num_rows
            others = (
                columns[wanted[field]] if field in wanted else nothing
                for field in ("session", "row_sampling", "row_schema")
            )
            for one_id, one_text, *rest in zip(columns[batch.id], columns[text], *others, strict=True):
                number += 1
                yield InputRow(one_id, one_text, f"{path.name}, row {number}", *rest)


def _json_rows(path: Path, batch: Batch) -> Iterator[InputRow]:
    is_openai = batch.format == "openai_batch"
    id_column = "custom_id" if is_openai else batch.id
    text = batch.prompt or batch.messages or ""
    for number, document in _json_documents(path):
        place = f"{path.name}, line {number}"
        one_id = document.get(id_column)
        if one_id is not None and (isinstance(one_id, bool) or not isinstance(one_id, str | int)):
            raise InputError(f"batch.id: {one_id!r} in {place} is neither a text nor an integer")
        yield InputRow(
            one_id,
            document if is_openai else document.get(text),
            place,
            document.get(batch.session) if batch.session else None,
            document.get(batch.row_sampling) if batch.row_sampling else None,
            document.get(batch.row_schema) if batch.row_schema else None,
        )


def _json_documents(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except ValueError as error:
                raise InputError(f"batch.input: line {number} of {path} is not JSON: {error}") from None
            if not isinstance(document, dict):
                raise InputError(f"batch.input: line {number} of {path} is not a JSON object")
            yield number, document
