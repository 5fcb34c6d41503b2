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
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.batch import files
from tasks.batch.asked import asked_of
from tasks.batch.input import InputDescription, InputRow
from tasks.batch.prompts import TokenCounter
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
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("sampling", pa.string()),
        pa.field("schema", pa.string()),
        pa.field("session", pa.string()),
        pa.field("prefix", pa.int64()),
        pa.field("error_class", pa.string()),
        pa.field("error_message", pa.string()),
    ]
)

_COUNTED_AT_ONCE = 512
_EXAMPLES = 5

_PREFIX_CHARACTERS = 1024
"""Rows whose chats are longer and begin with the same so many are sent together: the engine computes what they
share once. Shorter beginnings cost less than it takes to keep them together."""

_COMMON = 0.05
"""Share of the rows above which a beginning is no reason to keep rows together: every worker will have it."""

_FORMAT = 2


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
        "format": _FORMAT,
        "input_format": batch.format,
        "input": [{"format": file.format, "sha256": files.hash_of(file.path)} for file in description.files],
        "id": batch.id,
        "bad_ids": batch.bad_ids,
        "prompt": batch.prompt,
        "messages": batch.messages,
        "system": batch.system,
        "session": batch.session,
        "sampling": batch.sampling.model_dump(mode="json"),
        "row_sampling": batch.row_sampling,
        "schema": batch.answer_schema,
        "row_schema": batch.row_schema,
        "too_long": batch.too_long,
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
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
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
    ids = _Ids(batch)
    described = []
    totals = {"rows": 0, "prompt_tokens": 0, "longest_prompt_tokens": 0, "sessions": 0}
    prefixes: list[pa.ChunkedArray] = []
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
                totals["sessions"] += table.num_rows - table.column("session").null_count
                prefixes.append(table.column("prefix").drop_null())
        described.append({**files.describe(path), "rows": pq.read_metadata(path).num_rows})
    ids.refuse_bad()
    if not described:
        raise InputError(f"batch.input: {batch.input} holds no rows")
    for item in described:
        files.move_in(draft / item["name"], place / item["name"])
    batch_id = batch_id_of(identity)
    manifest = {"format": _FORMAT, "batch_id": batch_id, "identity": identity, "files": described, **totals}
    manifest["common_prefixes"] = _common(prefixes, totals["rows"])
    # By way of the draft, so that whatever a kill leaves lies in there.
    files.write_json(draft / "manifest.json", manifest)
    files.move_in(draft / "manifest.json", place / "manifest.json")
    sync_folder(place)
    shutil.rmtree(draft)
    return PreparedBatch(batch_id, folder, manifest)


class _Ids:
    """The ids of all rows: 16 to 40 bytes each, the only thing that grows with the input."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._chunks: list[pa.Array] = []
        self._missing: list[str] = []
        self._missing_rows = 0
        self._rows = 0
        self._met: Counter[str] = Counter()
        """Only where rows are kept apart."""

    def add(self, rows: list[InputRow]) -> list[str]:
        """Take the ids of some rows; returns them as texts."""
        texts = ["" if row.id is None else str(row.id) for row in rows]
        if self._batch.bad_ids == "keep_apart":
            texts = [self._apart(text, self._rows + number) for number, text in enumerate(texts, start=1)]
        self._rows += len(rows)
        for row, text in zip(rows, texts, strict=True):
            if not text:
                self._missing_rows += 1
                if len(self._missing) < _EXAMPLES:
                    self._missing.append(row.place)
        self._chunks.append(pa.array(texts, pa.string()))
        return texts

    def _apart(self, text: str, number: int) -> str:
        if not text:
            return f"row-{number}"
        self._met[text] += 1
        return text if self._met[text] == 1 else f"{text}#{self._met[text]}"

    def refuse_bad(self) -> None:
        """Raises:
        InputError: an id is missing, or two rows have the same one.
        """
        column = "custom_id" if self._batch.format == "openai_batch" else self._batch.id
        if self._missing_rows:
            raise InputError(
                f"batch.id: {self._missing_rows} rows have no id in column {column!r}, for example "
                f"{'; '.join(self._missing)}; every row needs one, so that its answer can be told from others "
                f"(or set batch.bad_ids to keep_apart)"
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
            f"batch.id: {len(twice)} ids in column {column!r} stand in more than one row, for example "
            f"{examples}; ids must be unique (texts and numbers that read alike count as the same; "
            f"batch.bad_ids: keep_apart gives such rows ids of their own)"
        )


def _tables(rows: Iterable[InputRow], batch: Batch, count: TokenCounter, ids: _Ids) -> Iterator[pa.Table]:
    """The rows as they will be asked, some hundreds at a time: tokens are counted in parallel."""
    position = 0
    source = iter(rows)
    while chunk := list(islice(source, _COUNTED_AT_ONCE)):
        asked = [asked_of(row, batch) for row in chunk]
        tokens = iter(count.count([one.chat for one in asked if one.chat is not None]))
        texts = [None if one.chat is None else _compact(one.chat) for one in asked]
        columns: dict[str, list[Any]] = {
            "position": list(range(position, position + len(chunk))),
            "id": ids.add(chunk),
            "messages": texts,
            "prompt_tokens": [0 if one.chat is None else next(tokens) for one in asked],
            "max_tokens": [one.sampling.get("max_tokens", batch.sampling.max_tokens) for one in asked],
            "sampling": [_compact(one.sampling) if one.sampling else None for one in asked],
            "schema": [_compact(one.schema) if one.schema else None for one in asked],
            "session": [None if row.session is None else str(row.session) for row in chunk],
            "prefix": [_prefix_of(text) for text in texts],
            "error_class": [one.error_class for one in asked],
            "error_message": [one.error_message for one in asked],
        }
        position += len(chunk)
        yield pa.table(columns, schema=SCHEMA)


def _prefix_of(text: str | None) -> int | None:
    if text is None or len(text) <= _PREFIX_CHARACTERS:
        return None
    beginning = text[:_PREFIX_CHARACTERS].encode()
    return int.from_bytes(blake2b(beginning, digest_size=8).digest(), "little", signed=True)


def _common(prefixes: list[pa.ChunkedArray], rows: int) -> list[int]:
    counts = pc.value_counts(pa.concat_arrays([chunk for one in prefixes for chunk in one.chunks]))
    often = counts.filter(pc.greater(counts.field("counts"), rows * _COMMON))
    return list(often.field("values").to_pylist())


def _compact(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


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
