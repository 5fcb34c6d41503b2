"""publish: make the answers visible, all at once.

Keeps:
- who follows the manifest sees one version, whole; it is replaced in one step, after its files are on disk;
- one at a time replaces it, and never by one of the same batch that holds less: whoever was slow leaves it;
- of several records of a row the first committed one is published; the order is the input's;
- the same answers make the same files, so a file that was deleted or changed is written again as it was, and
  nothing is written when nothing changed;
- nothing is published that `reconcile` would refuse.
"""

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.batch import drafts, files, in_ledger, prepared, published, reconcile, retention, rows, versions
from tasks.batch.prepared import PreparedBatch
from tasks.batch.rows import Answers
from tasks.contract import Context, Outcome
from tasks.errors import StageFailed
from tasks.node.atomic import sync_folder
from tasks.spec import RunSpec

_KEPT_VERSIONS = 2
"""The current one, and the one that a reader may have open."""


@dataclass(frozen=True)
class Plan:
    """What differs between what is answered and what readers see."""

    batch: PreparedBatch
    answers: Answers
    difference: str | None
    """For a person; None when readers see what is answered."""
    manifest: dict[str, Any] | None
    """The one that readers see now; None when it is another batch's, or there is none."""
    abandoned: list[Path]
    """Drafts of killed attempts."""

    @property
    def satisfied(self) -> bool:
        """Whether readers see what is answered."""
        return self.difference is None

    @property
    def reason(self) -> str:
        """For a person."""
        version = self.manifest["version"] if self.manifest else ""
        return self.difference or f"version {version} is published, and every file of it is as it was"


def plan(context: Context) -> Plan:
    """Compare what is answered with what is published."""
    ledger = context.claim.ledger
    batch = prepared.of_run(ledger, context.run.run_id)
    output = _output(context.run.spec)
    answers = rows.answers_of(ledger, batch.batch_id, output)
    manifest = published.manifest_of(output, batch.batch_id)
    left = drafts.abandoned(output, ledger)
    return Plan(batch, answers, _difference(context, batch, answers, manifest, left), manifest, left)


def _difference(
    context: Context,
    batch: PreparedBatch,
    answers: Answers,
    manifest: dict[str, Any] | None,
    left: list[Path],
) -> str | None:
    harm = _harm(context, batch, manifest)
    if manifest is None or harm is not None:
        return harm
    counted = rows.survey(batch, answers, context.run.spec)
    now = {"answered": counted.answered, "failed": counted.failed, "not_started": counted.to_do}
    # Finished rows stay finished, so equal counts mean the same rows.
    if any(manifest[name] != value for name, value in now.items()):
        return "more rows are finished"
    if left:
        return "a killed attempt left its draft"
    if _old_versions(_output(context.run.spec), manifest["version"]):
        return "more old versions are kept than there should be"
    return None


def _harm(context: Context, batch: PreparedBatch, manifest: dict[str, Any] | None) -> str | None:
    """What is wrong with what readers see, however much of the batch that is; for a person."""
    output = _output(context.run.spec)
    if manifest is None:
        return f"nothing of batch {batch.batch_id} is published in {output}"
    bad = published.damaged(output, manifest)
    if bad:
        return f"{', '.join(bad)} missing or changed"
    if not in_ledger.is_published(context.claim.ledger, batch.batch_id, output, manifest["version"]):
        return f"version {manifest['version']} is published, but the ledger does not know it"
    return None


def apply(plan: Plan, context: Context) -> None:
    """Write the version beside the others, then point the manifest to it."""
    # Refuses what must not be published, also when this stage is executed alone.
    reconcile.verify(context)
    claim, batch_id, output = context.claim, plan.batch.batch_id, _output(context.run.spec)
    drafts.remove(plan.abandoned)
    draft = drafts.make(output, claim)
    manifest = versions.write(plan.batch, plan.answers, context.run.spec, draft)
    _make_durable(draft, manifest)
    with in_ledger.publishing(claim, output):
        now = published.manifest_of(output, batch_id)
        if now is not None and now != plan.manifest and _holds_more(now, manifest):
            shutil.rmtree(draft)
            manifest = now
        else:
            _move_in(draft, output / manifest["version"], manifest)
        # Only mended, it is the same: writing it again could only leave a draft that nobody looks for.
        if manifest != now:
            files.write_json(published.manifest_path(output), manifest)
        in_ledger.record_publication(
            claim,
            batch_id,
            output,
            manifest["version"],
            answered=manifest["answered"],
            failed=manifest["failed"],
            not_started=manifest["not_started"],
        )
        for old in _old_versions(output, manifest["version"]):
            shutil.rmtree(old, ignore_errors=True)
    _remove_old_batches(context)


def verify(context: Context) -> Outcome:
    """Read what readers see; another run of the batch may finish and publish more meanwhile.

    Raises:
        StageFailed: a published file is not as it was written, or rows are missing that the spec asks for.
    """
    batch = prepared.of_run(context.claim.ledger, context.run.run_id)
    output = _output(context.run.spec)
    manifest = published.manifest_of(output, batch.batch_id)
    harm = _harm(context, batch, manifest)
    if manifest is None or harm is not None:
        raise StageFailed(f"{output} does not hold what was published: {harm}; did somebody change it?")
    if manifest["not_started"] and not context.run.spec.limits.partial:
        raise StageFailed(
            f"{manifest['not_started']} of {manifest['rows']} rows of {output / manifest['version']} are not "
            f"started, and limits.partial is false: run the stages start, run and publish again"
        )
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


def _holds_more(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Of two manifests of one batch. Answers first: what is too long for one run's context is none of its failures."""
    return (one["answered"], one["failed"]) > (other["answered"], other["failed"])


def _make_durable(draft: Path, manifest: dict[str, Any]) -> None:
    for item in manifest["files"]:
        with (draft / item["name"]).open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(draft)


def _move_in(draft: Path, place: Path, manifest: dict[str, Any]) -> None:
    """Put the version in its place; where it is damaged, only the damaged files are replaced."""
    try:
        draft.rename(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
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


def _remove_old_batches(context: Context) -> None:
    """What runs of batches worked with that were published long ago."""
    claim, retention_s = context.claim, context.settings.batch_retention_h * 3600
    for batch_id in retention.past(claim.ledger, retention_s):
        retention.remove(claim, batch_id, retention_s)
