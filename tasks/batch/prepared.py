"""The prepared batch: the input's rows as they will be asked, in the input's order, and the batch's identity.

    OUTPUT/_batch/BATCH_ID/prepared/part-00000.parquet ... and manifest.json, written last
    OUTPUT/_batch/BATCH_ID/segments/                       finished rows, see `segments`
    OUTPUT/_batch/BATCH_ID/work/                           of a Spark application, may be deleted

The batch id is a hash of what decides the answers: the input's content, the columns, sampling, schema and
release. Not of names of files, deadline, node or layout: two runs that differ only there share their
answers.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.batch import files
from tasks.batch.input import InputDescription, InputRow
from tasks.batch.prompts import BadRow, TokenCounter, chat_of
from tasks.errors import InputError, StageFailed
from tasks.node.atomic import sync_folder
from tasks.spec import Batch, RunSpec

PART_ROWS = 50_000
"""Rows in one file: what is held in memory at once, here and when publishing."""

SCHEMA = pa.schema(
    [
        pa.field("position", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("messages", pa.string()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("row_hash", pa.string(), nullable=False),
        pa.field("error_class", pa.string()),
        pa.field("error_message", pa.string()),
    ]
)

_COUNTED_AT_ONCE = 512
_EXAMPLES = 5


@dataclass(frozen=True)
class PreparedBatch:
    """A batch whose rows are on disk."""

    batch_id: str
    folder: Path
    """OUTPUT/_batch/BATCH_ID"""
    manifest: dict[str, Any]

    @property
    def rows(self) -> int:
        """Rows of the input."""
        return int(self.manifest["rows"])

    @property
    def segments(self) -> Path:
        """Where finished rows are written."""
        return self.folder / "segments"

    @property
    def parts(self) -> list[Path]:
        """The parquet files, in the input's order."""
        return [self.folder / "prepared" / item["name"] for item in self.manifest["files"]]


def identity_of(spec: RunSpec, description: InputDescription, release_id: str) -> dict[str, Any]:
    """What the batch id is the hash of; reads the whole input once to hash it."""
    batch = spec.batch
    return {
        "format": 1,
        "input": [{"format": file.format, "sha256": files.hash_of(file.path)} for file in description.files],
        "id": batch.id,
        "prompt": batch.prompt,
        "messages": batch.messages,
        "system": batch.system,
        "sampling": batch.sampling.model_dump(mode="json"),
        "schema": batch.answer_schema,
        "release_id": release_id,
    }


def batch_id_of(identity: dict[str, Any]) -> str:
    """16 hex digits."""
    return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def folder_of(output: str, batch_id: str) -> Path:
    """Where the batch is kept, beside what is published."""
    return Path(output).absolute() / "_batch" / batch_id


def find(folder: Path) -> PreparedBatch | None:
    """The batch in `folder`, whatever state its files are in; None when it was never finished."""
    manifest = files.read_json(folder / "prepared" / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != 1:
        return None
    return PreparedBatch(manifest["batch_id"], folder, manifest)


def load(folder: Path) -> PreparedBatch:
    """The batch in `folder`.

    Raises:
        StageFailed: it is not there.
    """
    found = find(folder)
    if found is None:
        raise StageFailed(f"the prepared batch {folder} is gone: run the stage prepare again")
    return found


def damaged(batch: PreparedBatch) -> list[str]:
    """Names of its files that are missing or hold something else than was written."""
    return files.damaged(batch.folder / "prepared", batch.manifest["files"])


def write(
    folder: Path,
    identity: dict[str, Any],
    rows: Iterable[InputRow],
    batch: Batch,
    count: TokenCounter,
    draft: Path,
) -> PreparedBatch:
    """Read all rows once and write the prepared batch; what was there is replaced file by file.

    Args:
        draft: an empty folder beside the batch; gone afterwards.

    Raises:
        InputError: ids are missing or not unique; with examples.
    """
    place = folder / "prepared"
    place.mkdir(exist_ok=True)
    ids = _Ids()
    described = []
    totals = {"rows": 0, "prompt_tokens": 0, "longest_prompt_tokens": 0}
    tables = _tables(rows, batch, count, ids)
    for number, part in enumerate(_in_parts(tables)):
        path = draft / f"part-{number:05d}.parquet"
        with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
            for table in part:
                writer.write_table(table)
                tokens = table.column("prompt_tokens")
                totals["rows"] += table.num_rows
                totals["prompt_tokens"] += pc.sum(tokens).as_py()
                totals["longest_prompt_tokens"] = max(totals["longest_prompt_tokens"], pc.max(tokens).as_py())
        described.append({**files.describe(path), "rows": pq.read_metadata(path).num_rows})
    ids.refuse_bad(batch)
    if not described:
        raise InputError(f"batch.input: {batch.input} holds no rows")
    for item in described:
        files.move_in(draft / item["name"], place / item["name"])
    batch_id = batch_id_of(identity)
    manifest = {"format": 1, "batch_id": batch_id, "identity": identity, "files": described, **totals}
    # By way of the draft, so that whatever a kill leaves lies in there.
    files.write_json(draft / "manifest.json", manifest)
    files.move_in(draft / "manifest.json", place / "manifest.json")
    sync_folder(place)
    shutil.rmtree(draft)
    return PreparedBatch(batch_id, folder, manifest)


class _Ids:
    """The ids of all rows: 16 to 40 bytes each, the only thing that grows with the input."""

    def __init__(self) -> None:
        self._chunks: list[pa.Array] = []
        self._missing: list[str] = []
        self._missing_rows = 0

    def add(self, rows: list[InputRow]) -> list[str]:
        """Take the ids of some rows; returns them as texts."""
        texts = ["" if row.id is None else str(row.id) for row in rows]
        for row, text in zip(rows, texts, strict=True):
            if not text:
                self._missing_rows += 1
                if len(self._missing) < _EXAMPLES:
                    self._missing.append(row.place)
        self._chunks.append(pa.array(texts, pa.string()))
        return texts

    def refuse_bad(self, batch: Batch) -> None:
        """Raises:
        InputError: an id is missing, or two rows have the same one.
        """
        if self._missing_rows:
            raise InputError(
                f"batch.id: {self._missing_rows} rows have no id in column {batch.id!r}, for example "
                f"{'; '.join(self._missing)}; every row needs one, so that its answer can be told from others"
            )
        all_ids = pa.chunked_array(self._chunks, pa.string())
        if pc.count_distinct(all_ids).as_py() == len(all_ids):
            return
        counts = pc.value_counts(all_ids.combine_chunks())
        twice = counts.filter(pc.greater(counts.field("counts"), 1))
        examples = ", ".join(
            f"{one['values']!r} ({one['counts']} rows)" for one in twice.slice(0, _EXAMPLES).to_pylist()
        )
        raise InputError(
            f"batch.id: {len(twice)} ids in column {batch.id!r} stand in more than one row, for example "
            f"{examples}; ids must be unique (texts and numbers that read alike count as the same)"
        )


def _tables(rows: Iterable[InputRow], batch: Batch, count: TokenCounter, ids: _Ids) -> Iterator[pa.Table]:
    """The rows as they will be asked, some hundreds at a time: tokens are counted in parallel."""
    position = 0
    source = iter(rows)
    while chunk := list(islice(source, _COUNTED_AT_ONCE)):
        columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        columns["id"] = ids.add(chunk)
        columns["position"] = list(range(position, position + len(chunk)))
        position += len(chunk)
        chats = []
        for row in chunk:
            try:
                chat, bad = chat_of(row.text, batch), None
            except BadRow as error:
                chat, bad = None, error
            chats.append(chat)
            text = None if chat is None else json.dumps(chat, ensure_ascii=False, separators=(",", ":"))
            columns["messages"].append(text)
            columns["error_class"].append(None if bad is None else bad.error_class)
            columns["error_message"].append(None if bad is None else str(bad))
        askable = [chat for chat in chats if chat is not None]
        tokens = iter(count.count(askable))
        columns["prompt_tokens"] = [0 if chat is None else next(tokens) for chat in chats]
        columns["row_hash"] = [
            sha256(f"{one_id}\0{text}".encode(errors="replace")).hexdigest()[:32]
            for one_id, text in zip(columns["id"], columns["messages"], strict=True)
        ]
        yield pa.table(columns, schema=SCHEMA)


def _in_parts(tables: Iterator[pa.Table]) -> Iterator[Iterator[pa.Table]]:
    """Groups of tables with about PART_ROWS rows; use up each group before the next."""
    waiting = next(tables, None)

    def part() -> Iterator[pa.Table]:
        nonlocal waiting
        rows = 0
        while waiting is not None and rows < PART_ROWS:
            rows += waiting.num_rows
            current, waiting = waiting, next(tables, None)
            yield current

    while waiting is not None:
        yield part()
