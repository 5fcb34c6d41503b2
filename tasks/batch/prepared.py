"""The prepared batch: the input's rows as they will be asked, in the input's order, and the batch's identity.

OUTPUT/_batch/BATCH_ID holds

    prepared/    part-00000.parquet ... and manifest.json, written last
    segments/    finished rows, see `segments`
    work/        of a Spark application, may be deleted

The batch id is a hash of what decides the answers: the input's content, the columns, sampling, schema and
release, and of how it is served what may change an answer. Not of names of files, deadline, node or layout: two
runs that differ only there share their answers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.batch import files
from tasks.batch.input import InputDescription
from tasks.errors import StageFailed
from tasks.ledger import Ledger
from tasks.ledger.claims import facts_of
from tasks.node.atomic import sync_folder
from tasks.spec import RunSpec

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

_TOTALLED = ["prompt_tokens", "session", "prefix"]

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
        **_served(spec),
    }


def replaced(description: InputDescription, identity: dict[str, Any]) -> list[str]:
    """Names of input files that do not hold any more what `identity_of` saw; reads the whole input once."""
    return [
        file.path.name
        for file, seen in zip(description.files, identity["input"], strict=True)
        if not files.holds(file.path, seen["sha256"])
    ]


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


def of_run(ledger: Ledger, run_id: str) -> PreparedBatch:
    """What the run's stage `prepare` made, or found.

    Raises:
        StageFailed: it has not been executed, or what it made is gone.
    """
    facts = facts_of(ledger, run_id, "prepare")
    if facts is None:
        raise StageFailed("the batch is not prepared: run the stage prepare first")
    return load(Path(facts["folder"]))


def damaged(batch: PreparedBatch) -> list[str]:
    """Names of its files that are missing or hold something else than was written."""
    return files.damaged(batch.folder / "prepared", batch.manifest["files"])


def publish(folder: Path, identity: dict[str, Any], drafts: Sequence[Path]) -> PreparedBatch:
    """Move the parts into place, in the input's order, and then their manifest, by which they count.

    Args:
        drafts: the parts, in one folder beside the batch; at least one.
    """
    place = folder / "prepared"
    place.mkdir(exist_ok=True)
    described = [{**files.describe(path), "rows": pq.read_metadata(path).num_rows} for path in drafts]
    totals = _totals(drafts)
    for path in drafts:
        files.move_in(path, place / path.name)
    batch_id = batch_id_of(identity)
    manifest = {"format": _FORMAT, "batch_id": batch_id, "identity": identity, "files": described, **totals}
    # By way of the draft, so that whatever a kill leaves lies in there.
    draft = drafts[0].with_name("manifest.json")
    files.write_json(draft, manifest)
    files.move_in(draft, place / "manifest.json")
    sync_folder(place)
    return PreparedBatch(batch_id, folder, manifest)


def _served(spec: RunSpec) -> dict[str, Any]:
    """What of `serving` decides answers; empty where nothing does, so that such a batch has one id however served."""
    decides: dict[str, Any] = {}
    # Which flags of vLLM change no answer cannot be known here.
    if spec.serving.extra_args:
        decides["extra_args"] = spec.serving.extra_args
    # It says where a prompt is cut off; and a turn that does not fit fails the later ones, which is recorded.
    if spec.batch.too_long == "truncate" or spec.batch.session is not None:
        decides["max_model_len"] = spec.serving.max_model_len
    return decides


def _totals(drafts: Sequence[Path]) -> dict[str, Any]:
    rows = tokens = longest = sessions = 0
    prefixes: list[pa.ChunkedArray] = []
    for path in drafts:
        table = pq.read_table(path, columns=_TOTALLED)
        rows += table.num_rows
        tokens += pc.sum(table.column("prompt_tokens")).as_py() or 0
        longest = max(longest, pc.max(table.column("prompt_tokens")).as_py() or 0)
        sessions += table.num_rows - table.column("session").null_count
        prefixes.append(table.column("prefix").drop_null())
    return {
        "rows": rows,
        "prompt_tokens": tokens,
        "longest_prompt_tokens": longest,
        "sessions": sessions,
        "common_prefixes": _common(prefixes, rows),
    }


def _common(prefixes: Sequence[pa.ChunkedArray], rows: int) -> list[int]:
    counts = pc.value_counts(
        pa.chunked_array([chunk for one in prefixes for chunk in one.chunks], pa.int64())
    )
    often = counts.filter(pc.greater(counts.field("counts"), rows * _COMMON))
    return list(often.field("values").to_pylist())
