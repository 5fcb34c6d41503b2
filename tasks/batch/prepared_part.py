"""One part of the prepared batch, from the rows of the input: work that any process can do, here or in Spark."""

import json
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.batch import parts
from tasks.batch.asked import asked_of
from tasks.batch.parts import InputRow, Part
from tasks.batch.prepared import SCHEMA
from tasks.batch.prompts import TokenCounter, storable
from tasks.spec import Batch

_COUNTED_AT_ONCE = 512

_PREFIX_CHARACTERS = 1024
"""Rows whose chats are longer and begin with the same so many are sent together: the engine computes what they
share once. Shorter beginnings cost less than it takes to keep them together."""


def path_of(part: Part, folder: Path) -> Path:
    """Where the part is."""
    return folder / f"part-{part.number:05d}.parquet"


def write(part: Part, batch: Batch, model: Path, folder: Path) -> None:
    """Read the part's rows, count their tokens and write them to `folder`. Its ids are not looked at.

    Args:
        model: the folder with the model's tokenizer and chat template.

    Raises:
        InputError: a file changed its columns or holds a line that is not a JSON object.
        StageFailed: the tokenizer cannot be read.
    """
    path = path_of(part, folder)
    # A second try of the same part may run while the first one is not quite dead.
    own = path.with_suffix(f".{uuid4().hex}")
    with pq.ParquetWriter(own, SCHEMA, compression="zstd") as writer:
        for table in _tables(part, batch, _counter(model)):
            writer.write_table(table)
    own.replace(path)


@cache
def _counter(model: Path) -> TokenCounter:
    return TokenCounter.of_model(model)


def _tables(part: Part, batch: Batch, count: TokenCounter) -> Iterator[pa.Table]:
    """The rows as they will be asked, some hundreds at a time: tokens are counted in parallel."""
    position = part.position
    source = parts.read(batch, part)
    while chunk := list(islice(source, _COUNTED_AT_ONCE)):
        asked = [asked_of(row, batch) for row in chunk]
        tokens = iter(count.count([one.chat for one in asked if one.chat is not None]))
        texts = [None if one.chat is None else _compact(one.chat) for one in asked]
        columns: dict[str, list[Any]] = {
            "position": list(range(position, position + len(chunk))),
            "id": [_id_of(row) for row in chunk],
            "messages": texts,
            "prompt_tokens": [0 if one.chat is None else next(tokens) for one in asked],
            "max_tokens": [one.sampling.get("max_tokens", batch.sampling.max_tokens) for one in asked],
            "sampling": [_compact(one.sampling) if one.sampling else None for one in asked],
            "schema": [_compact(one.schema) if one.schema else None for one in asked],
            "session": [_session_of(row) for row in chunk],
            "prefix": [_prefix_of(text) for text in texts],
            "error_class": [one.error_class for one in asked],
            "error_message": [one.error_message and storable(one.error_message) for one in asked],
        }
        position += len(chunk)
        yield pa.table(columns, schema=SCHEMA)


def _id_of(row: InputRow) -> str:
    """Empty where there is none that can be stored: see `ids`."""
    text = "" if row.id is None else str(row.id)
    return text if text == storable(text) else ""


def _session_of(row: InputRow) -> str | None:
    """Lone surrogates are spelt out: replaced by one sign, two sessions could become one."""
    return None if row.session is None else str(row.session).encode("utf-8", "backslashreplace").decode()


def _prefix_of(text: str | None) -> int | None:
    if text is None or len(text) <= _PREFIX_CHARACTERS:
        return None
    beginning = text[:_PREFIX_CHARACTERS].encode()
    return int.from_bytes(blake2b(beginning, digest_size=8).digest(), "little", signed=True)


def _compact(document: Any) -> str:
    return storable(json.dumps(document, ensure_ascii=False, separators=(",", ":")))
