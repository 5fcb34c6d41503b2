"""publish: make the answers visible, all at once.

Keeps:
- who follows the manifest sees one version, whole; it is replaced in one step, after its files are on disk;
- of several records of a row the first committed one is published; the order is the input's;
- the same answers make the same files, so a file that was deleted or changed is written again as it was, and
  nothing is written when nothing changed;
- nothing is published that `reconcile` would refuse.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.batch import drafts, files, in_ledger, prepared, published, reconcile, rows, segments
from tasks.batch.prepared import PreparedBatch
from tasks.batch.rows import Answers
from tasks.contract import Context, Outcome
from tasks.errors import StageFailed
from tasks.ledger.claims import facts_of
from tasks.node.atomic import sync_folder
from tasks.spec import RunSpec

_KEPT_VERSIONS = 2
"""The current one, and the one that a reader may have open."""

_FAILED = "failed.jsonl"


@dataclass(frozen=True)
class Plan:
    """What differs between what is answered and what readers see."""

    batch: PreparedBatch
    answers: Answers
    difference: str | None
    """For a person; None when readers see what is answered."""
    version: str
    abandoned: list[Path]
    """Drafts of killed attempts."""

    @property
    def satisfied(self) -> bool:
        """Whether readers see what is answered."""
        return self.difference is None

    @property
    def reason(self) -> str:
        """For a person."""
        return self.difference or f"version {self.version} is published, and every file of it is as it was"


def plan(context: Context) -> Plan:
    """Compare what is answered with what is published."""
    run, ledger = context.run, context.claim.ledger
    facts = facts_of(ledger, run.run_id, "prepare")
    if facts is None:
        raise StageFailed("the batch is not prepared: run the stage prepare first")
    batch = prepared.load(Path(facts["folder"]))
    output = _output(run.spec)
    answers = rows.answers_of(ledger, batch.batch_id, output)
    manifest = published.manifest_of(output, batch.batch_id)
    left = drafts.abandoned(output, ledger)
    version = manifest["version"] if manifest else ""
    return Plan(batch, answers, _difference(context, batch, answers, manifest, left), version, left)


def _difference(
    context: Context,
    batch: PreparedBatch,
    answers: Answers,
    manifest: dict[str, Any] | None,
    left: list[Path],
) -> str | None:
    output = _output(context.run.spec)
    if manifest is None:
        return f"nothing of batch {batch.batch_id} is published in {output}"
    bad = published.damaged(output, manifest)
    if bad:
        return f"{', '.join(bad)} missing or changed"
    counted = rows.survey(batch, answers, context.run.spec)
    now = {"answered": counted.answered, "failed": counted.failed, "not_started": counted.to_do}
    # Finished rows stay finished, so equal counts mean the same rows.
    if any(manifest[name] != value for name, value in now.items()):
        return "more rows are finished"
    if left:
        return "a killed attempt left its draft"
    if not in_ledger.is_published(context.claim.ledger, batch.batch_id, output, manifest["version"]):
        return f"version {manifest['version']} is published, but the ledger does not know it"
    if _old_versions(output, manifest["version"]):
        return "more old versions are kept than there should be"
    return None


def apply(plan: Plan, context: Context) -> None:
    """Write the version beside the others, then point the manifest to it."""
    # Refuses what must not be published, also when this stage is executed alone.
    reconcile.verify(context)
    claim, output = context.claim, _output(context.run.spec)
    drafts.remove(plan.abandoned)
    draft = drafts.make(output, claim)
    manifest = _write(plan.batch, plan.answers, context.run.spec, draft)
    _move_in(draft, output / manifest["version"], manifest)
    # Only mended, it is the same: writing it again could only leave a draft that nobody looks for.
    if manifest != published.manifest_of(output, plan.batch.batch_id):
        files.write_json(published.manifest_path(output), manifest)
    in_ledger.record_publication(
        claim,
        plan.batch.batch_id,
        output,
        manifest["version"],
        answered=manifest["answered"],
        failed=manifest["failed"],
        not_started=manifest["not_started"],
    )
    for old in _old_versions(output, manifest["version"]):
        shutil.rmtree(old, ignore_errors=True)
    _remove_old_segments(context)


def verify(context: Context) -> Outcome:
    """Read what readers see.

    Raises:
        StageFailed: a published file is not as it was written.
    """
    output = _output(context.run.spec)
    again = plan(context)
    manifest = published.manifest_of(output, again.batch.batch_id)
    if manifest is None or not again.satisfied:
        raise StageFailed(f"{output} does not hold what is answered: {again.reason}; did somebody change it?")
    size = sum(item["bytes"] for item in manifest["files"])
    facts = {
        "output": str(output),
        "version": manifest["version"],
        "answered": manifest["answered"],
        "failed": manifest["failed"],
        "bytes": size,
        "manifest": str(published.manifest_path(output)),
    }
    part = (
        "" if not manifest["not_started"] else f" (partial: {manifest['not_started']} rows are not started)"
    )
    counts = f"{manifest['answered']} answers and {manifest['failed']} failed rows"
    message = f"{counts} in {output / manifest['version']}{part}"
    return Outcome(message, facts)


def _output(spec: RunSpec) -> Path:
    return Path(spec.batch.output).absolute()


def _write(batch: PreparedBatch, answers: Answers, spec: RunSpec, draft: Path) -> dict[str, Any]:
    """Write all files of the version into `draft`; returns its manifest."""
    counts = {"answered": 0, "failed": 0, "not_started": 0}
    described = []
    with ExitStack() as stack, (draft / _FAILED).open("w", encoding="utf-8") as failed_file:
        reader = stack.enter_context(_Reader(answers))
        for number, part in enumerate(batch.parts):
            path = draft / f"part-{number:05d}.parquet"
            table = pa.Table.from_pylist(
                list(_published_rows(part, reader, spec, batch, counts, failed_file.write)),
                schema=published.SCHEMA,
            )
            pq.write_table(table, path, compression="zstd")
            described.append({**files.describe(path), "rows": table.num_rows})
    described.append({**files.describe(draft / _FAILED), "rows": counts["failed"]})
    version = sha256(json.dumps([item["sha256"] for item in described]).encode()).hexdigest()[:12]
    return {
        "format": 1,
        "batch_id": batch.batch_id,
        "release_id": batch.manifest["identity"]["release_id"],
        "version": f"v-{version}",
        "rows": batch.rows,
        **counts,
        "partial": counts["not_started"] > 0,
        "files": described,
    }


def _published_rows(
    part: Path,
    reader: "_Reader",
    spec: RunSpec,
    batch: PreparedBatch,
    counts: dict[str, int],
    write_failed: Any,
) -> Iterator[dict[str, Any]]:
    refusal = rows.refusal_rule(spec)
    release_id = batch.manifest["identity"]["release_id"]
    for prepared_row in pq.read_table(part).to_pylist():
        row = reader.row(prepared_row["id"])
        if row is None:
            refused = refusal(
                prepared_row["error_class"], prepared_row["error_message"], prepared_row["prompt_tokens"]
            )
            if refused is None:
                counts["not_started"] += 1
                continue
            row = _never_sent(prepared_row, refused, release_id)
        if row["status"] == "answered":
            counts["answered"] += 1
        else:
            counts["failed"] += 1
            again = _as_input(prepared_row, row, spec)
            write_failed(json.dumps(again, ensure_ascii=False) + "\n")
        yield row


def _never_sent(prepared_row: dict[str, Any], refused: tuple[str, str], release_id: str) -> dict[str, Any]:
    return {
        "id": prepared_row["id"],
        "status": "failed",
        "error_class": refused[0],
        "error_message": refused[1],
        "prompt_tokens": prepared_row["prompt_tokens"],
        "completion_tokens": 0,
        "attempts": 0,
        "release_id": release_id,
    }


def _as_input(prepared_row: dict[str, Any], row: dict[str, Any], spec: RunSpec) -> dict[str, Any]:
    """A failed row as the spec's input had it, with what went wrong beside it."""
    chat = json.loads(prepared_row["messages"]) if prepared_row["messages"] is not None else None
    if spec.batch.prompt is not None:
        text = {spec.batch.prompt: chat[-1]["content"] if chat else None}
    else:
        text = {spec.batch.messages or "": chat}
    return {
        spec.batch.id: row["id"],
        **text,
        "error_class": row["error_class"],
        "error_message": row["error_message"],
    }


class _Reader:
    """Finished rows by id, from segments and from the version published before."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._stack = ExitStack()
        self._segments: dict[Path, int] = {}
        self._part: tuple[Path, dict[str, dict[str, Any]]] | None = None

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def row(self, row_id: str) -> dict[str, Any] | None:
        """The row as it is published; None when it is not finished.

        Raises:
            StageFailed: its record went away while we read.
        """
        known = self._answers.known.get(row_id)
        if known is None:
            return None
        try:
            if known.length < 0:
                return self._published(known.path)[row_id]
            result = segments.read_at(self._segment(known.path), known.offset, known.length)
        except (OSError, ValueError, KeyError):
            raise StageFailed(
                f"the record of row {row_id} in {known.path} went away; publish again"
            ) from None
        return {name: getattr(result, name) for name in published.SCHEMA.names}

    def _segment(self, path: Path) -> int:
        if path not in self._segments:
            self._segments[path] = os.open(path, os.O_RDONLY)
            self._stack.callback(partial(os.close, self._segments[path]))
        return self._segments[path]

    def _published(self, path: Path) -> dict[str, dict[str, Any]]:
        # Parts follow the input's order, as the reading does: one in memory is enough.
        if self._part is None or self._part[0] != path:
            self._part = (path, {row["id"]: row for row in pq.read_table(path).to_pylist()})
        return self._part[1]


def _move_in(draft: Path, place: Path, manifest: dict[str, Any]) -> None:
    """Put the version in its place; where it is damaged, only the damaged files are replaced."""
    for item in manifest["files"]:
        with (draft / item["name"]).open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(draft)
    with suppress(OSError):
        draft.rename(place)
        sync_folder(place.parent)
        return
    for name in files.damaged(place, manifest["files"]):
        (draft / name).replace(place / name)
    sync_folder(place)
    shutil.rmtree(draft)


def _old_versions(output: Path, current: str) -> list[Path]:
    """Those that no reader should have open any more."""
    versions = sorted(output.glob("v-*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    others = [path for path in versions if path.name != current]
    return others[_KEPT_VERSIONS - 1 :]


def _remove_old_segments(context: Context) -> None:
    """Of every batch that was published long ago; its published files say from now on what is answered."""
    claim = context.claim
    for batch_id in in_ledger.past_retention(claim.ledger, context.settings.segment_retention_h * 3600):
        for path in in_ledger.forget_segments(claim, batch_id):
            path.unlink(missing_ok=True)
