"""What is published beside the parquet files: failed rows as input rows, and the answers as JSON Lines."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute as pc

from tasks.batch import openai_batch
from tasks.spec import RunSpec

NAMES = {"failed": "failed.jsonl", "jsonl": "answers.jsonl", "openai_batch": "openai-batch.jsonl"}


class JsonLines:
    """A file that grows by a line a row."""

    def __init__(
        self, name: str, file: TextIO, lines: Callable[[pa.Table, pa.Table], Iterator[dict[str, Any]]]
    ) -> None:
        self.name = name
        self.rows = 0
        self._file = file
        self._lines = lines

    def add(self, table: pa.Table, prepared_rows: pa.Table) -> None:
        """Take published rows, and the prepared rows that they are among."""
        for document in self._lines(table, prepared_rows):
            self._file.write(json.dumps(document, ensure_ascii=False) + "\n")
            self.rows += 1


@contextmanager
def open_format(folder: Path, kind: str, spec: RunSpec) -> Iterator[JsonLines]:
    """A new file of one of the `NAMES`; whole on disk when the block ends is the caller's care."""
    lines = {
        "failed": lambda table, prepared_rows: _failed(table, prepared_rows, spec),
        "jsonl": lambda table, prepared_rows: iter(table.to_pylist()),
        "openai_batch": lambda table, prepared_rows: map(openai_batch.response_line, table.to_pylist()),
    }[kind]
    with (folder / NAMES[kind]).open("w", encoding="utf-8") as file:
        yield JsonLines(NAMES[kind], file, lines)


def _failed(table: pa.Table, prepared_rows: pa.Table, spec: RunSpec) -> Iterator[dict[str, Any]]:
    failed = table.filter(pc.equal(table.column("status"), "failed"))
    places = pc.index_in(failed.column("id"), value_set=prepared_rows.column("id").combine_chunks())
    before = prepared_rows.take(places).to_pylist()
    for row, prepared_row in zip(failed.to_pylist(), before, strict=True):
        yield _as_input(prepared_row, row, spec)


def _as_input(prepared_row: dict[str, Any], row: dict[str, Any], spec: RunSpec) -> dict[str, Any]:
    """A failed row as the spec's input had it, with what went wrong beside it."""
    batch = spec.batch
    why = {"error_class": row["error_class"], "error_message": row["error_message"]}
    chat = json.loads(prepared_row["messages"]) if prepared_row["messages"] is not None else None
    own = {name: json.loads(prepared_row[name]) for name in ("sampling", "schema") if prepared_row[name]}
    if batch.format == "openai_batch":
        body = {"messages": chat, **own.get("sampling", {})}
        if "schema" in own:
            named = {"name": "answer", "schema": own["schema"]}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return {"custom_id": row["id"], "method": "POST", "url": openai_batch.URL, "body": body, **why}
    document: dict[str, Any] = {batch.id: row["id"]}
    if batch.prompt is not None:
        document[batch.prompt] = chat[-1]["content"] if chat else None
    else:
        document[batch.messages or ""] = chat
    for column, value in (
        (batch.session, prepared_row["session"]),
        (batch.row_sampling, own.get("sampling")),
        (batch.row_schema, own.get("schema")),
    ):
        if column is not None:
            document[column] = value
    return {**document, **why}
