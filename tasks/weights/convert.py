"""Make the release: converted, verified, whole; made once and found again by its fingerprint.

Keeps:
- A release is visible whole or not at all, and what is visible was verified: its structure, its numbers
  (`gate`), and where this node can, that vLLM loads it (`trial`).
- Two runs that want one release: one works, under the release's node lock; the other waits and finds it.
- A damaged release is mended from the download where its files were carried over, and made again where not.
- Converting holds no lease, so it never touches a GPU.
"""

import hashlib
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psycopg.types.json import Jsonb

from tasks.contract import Context, Outcome
from tasks.errors import Busy, StageFailed
from tasks.node import lock
from tasks.weights import conversion, gate, recipes, source, store, tensors
from tasks.weights.store import Manifest
from tasks.weights.verify import verify_carried_over

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What is missing of a release."""

    folder: Path
    manifest: Manifest | None
    """None: it was never made, or its manifest is gone."""
    wrong: tuple[str, ...]
    recorded: bool
    """Whether the ledger knows it under this manifest."""
    leftovers: tuple[Path, ...]
    """Staging folders of attempts that were killed (or of one that lives)."""

    @property
    def whole(self) -> bool:
        """Whether every file is there with its sha256."""
        return self.manifest is not None and not self.wrong

    @property
    def satisfied(self) -> bool:
        """Whether nothing is to be done."""
        return self.whole and self.recorded and not self.leftovers

    @property
    def reason(self) -> str:
        """See `tasks.contract`."""
        if self.manifest is None:
            return f"release {self.folder.name} is not in the store"
        if self.wrong:
            return f"of release {self.folder.name} are missing or changed: {', '.join(self.wrong)}"
        if not self.recorded:
            return f"release {self.folder.name} is whole and not recorded in the ledger"
        if self.leftovers:
            return "a killed attempt left files behind"
        size = f"{self.manifest.bytes / 1e9:.2f} GB"
        return f"release {self.folder.name} is in the store, {size}, every file right"


def plan(context: Context) -> Plan:
    """Compare the store with the release that the run is pinned to."""
    release_id = _release_id(context)
    folder = store.release_folder(context.settings, release_id)
    manifest = store.read_manifest(folder / store.MANIFEST)
    if manifest is not None and manifest.about.get("fingerprint") != context.run.pins["fingerprint"]:
        manifest = None
    wrong = store.wrong_files(folder, manifest, context.settings) if manifest else []
    recorded = manifest is not None and _recorded(context) == _hash_of(manifest)
    leftovers = sorted((context.settings.store / "staging").glob(f"{release_id}.*"))
    return Plan(folder, manifest, tuple(wrong), recorded, tuple(leftovers))


def apply(plan: Plan, context: Context) -> None:
    """Make or mend the release, publish it, record it.

    Raises:
        InputError: the architecture is unknown, or the group size does not divide a layer.
        StageFailed: the converter failed, its output is not as it must be or not good enough, or disk or memory
            are too small.
        Busy: another run makes the same release and took too long.
    """
    release_id = _release_id(context)
    purpose = f"making of release {release_id} for run {context.run.run_id}"
    with lock.held(_lock_file(release_id, context), purpose, context.settings.weights_wait_s):
        plan = _plan_again(context)
        for leftover in plan.leftovers:
            store.remove(leftover)
        if not plan.whole:
            _sweep(release_id, context)
            _make(plan, context)
            plan = _plan_again(context)
        if plan.manifest is not None and not plan.recorded:
            _record(plan.folder, plan.manifest, context)


def verify(context: Context) -> Outcome:
    """Read the store again."""
    found = plan(context)
    if found.manifest is None or found.wrong or not found.recorded:
        raise StageFailed(f"the release is not there after all: {found.reason}")
    _refuse_by_these_limits(found.manifest, context)
    facts = {"release_id": found.folder.name, "path": str(found.folder), "bytes": found.manifest.bytes}
    base_bytes = found.manifest.about["metrics"]["base_bytes"]
    share = found.manifest.bytes / base_bytes
    metrics = found.manifest.about["metrics"]
    facts |= {name: metrics[name] for name in _TOLD if name in metrics}
    numbers = f", KL {metrics['kl']:.3g}, {metrics['served']}" if "kl" in metrics else ""
    return Outcome(
        f"release {found.folder.name}: {found.manifest.bytes / 1e9:.2f} GB, {share:.0%} of the download{numbers}",
        facts,
    )


_TOLD = ("made_by", "perplexity", "base_perplexity", "kl", "served")
"""Metrics that later stages and readers of the run are told."""

_plan_again = plan


def _refuse_by_these_limits(manifest: Manifest, context: Context) -> None:
    """A release is made once, and a later spec may ask more of it than the one that it was made for."""
    scheme = manifest.about["fingerprint"]["scheme"]
    if scheme == "none":
        return
    limits = gate.limits_of(scheme, context.run.spec.convert.gate)
    if problems := gate.recorded_problems(manifest.about["metrics"], limits):
        raise StageFailed(
            f"release {manifest.about['release_id']} is in the store, and by convert.gate of this spec it is not "
            f"good enough: {'; '.join(problems)}"
        )


def _make(plan: Plan, context: Context) -> None:
    base, base_manifest = _base(plan, context)
    staging_area = context.settings.store / "staging"
    staging_area.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{_release_id(context)}.", dir=staging_area))
    try:
        manifest, release = plan.manifest, work / "release"
        if manifest is not None and _mend(plan, manifest, base, base_manifest, release):
            log.info("mended from the download: %s", ", ".join(plan.wrong))
        else:
            release, manifest = _convert(base, base_manifest, work, context)
            if plan.manifest is not None and manifest != plan.manifest:
                log.warning(
                    "release %s was made again and some of its bytes differ from before", plan.folder.name
                )
        store.publish(release, plan.folder, store.MANIFEST, manifest, context.settings)
    finally:
        store.remove(work)


def _sweep(but: str, context: Context) -> None:
    """Remove what killed attempts at other releases left: whoever lives holds the lock of its release."""
    for folder in sorted((context.settings.store / "staging").glob("*.*")):
        release_id = folder.name.rpartition(".")[0]
        if release_id == but or folder.name.startswith(store.DOWNLOAD_STAGING):
            continue  # a partial download is worth keeping: the next attempt goes on from it
        try:
            with lock.held(
                _lock_file(release_id, context), "removal of what a killed attempt left", wait_s=0
            ):
                store.remove(folder)
        except Busy:
            continue


def _mend(plan: Plan, manifest: Manifest, base: Path, base_manifest: Manifest, release: Path) -> bool:
    """Put the release together from its own right files and the download's; False when one is in neither."""
    release.mkdir()
    for name, file in manifest.files.items():
        if name not in plan.wrong:
            store.put(plan.folder / name, release / name)
        elif base_manifest.files.get(name) == file:
            conversion.carry_over(name, base, release)
        else:
            shutil.rmtree(release)
            return False
    return True


def _convert(base: Path, base_manifest: Manifest, work: Path, context: Context) -> tuple[Path, Manifest]:
    """The release below `work`, and its manifest."""
    about: dict[str, Any] = {}
    metrics: dict[str, Any] = {"base_bytes": base_manifest.bytes}
    if context.run.spec.convert.scheme == "none":
        release = work / "release"
        release.mkdir()
        for name in base_manifest.files:
            conversion.carry_over(name, base, release)
        tensors.check_index(release, tensors.read(release))
    else:
        release, found = conversion.convert(base, base_manifest, work, context)
        metrics |= found["metrics"]
        about["reading"] = found["reading"]
    about |= {
        "kind": "release",
        "release_id": _release_id(context),
        "architecture": recipes.architecture(tensors.read_config(base)),
        "fingerprint": context.run.pins["fingerprint"],
        "metrics": metrics,
    }
    manifest = store.describe(release, about)
    verify_carried_over(base_manifest, manifest)
    return release, manifest


def _base(plan: Plan, context: Context) -> tuple[Path, Manifest]:
    """The download, proven."""
    repo = context.run.spec.model.repo
    if source.release_named(repo) is not None:
        raise StageFailed(
            f"{plan.reason}, and the run is given the release alone: a run of its repository "
            f"({context.run.pins['fingerprint']['repo']}) with the same convert mends it or makes it again"
        )
    folder = store.download_folder(context.settings, repo, context.run.pins["commit"])
    manifest = store.read_manifest(folder / store.DOWNLOAD_MANIFEST)
    wrong = store.wrong_files(folder, manifest, context.settings) if manifest else ["all"]
    if manifest is None or wrong:
        raise StageFailed(
            f"the download at {folder} is not whole ({', '.join(wrong)}): execute the stage download first"
        )
    return folder, manifest


def _record(folder: Path, manifest: Manifest, context: Context) -> None:
    with context.claim.writing() as connection:
        context.claim.ledger.queries.put_release(
            connection,
            node=context.settings.node,
            release_id=folder.name,
            path=str(folder),
            manifest_sha256=_hash_of(manifest),
            fingerprint=Jsonb(manifest.about["fingerprint"]),
            metrics=Jsonb(manifest.about["metrics"]),
            bytes=manifest.bytes,
            files=len(manifest.files),
            run_id=context.run.run_id,
        )


def _recorded(context: Context) -> str | None:
    ledger = context.claim.ledger
    with ledger.transaction() as connection:
        found = ledger.queries.recorded_manifest(
            connection, node=context.settings.node, release_id=_release_id(context)
        )
    return None if found is None else str(found)


def _hash_of(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.dumps().encode()).hexdigest()


def _lock_file(release_id: str, context: Context) -> Path:
    return context.settings.locks / f"release-{release_id}.lock"


def _release_id(context: Context) -> str:
    return str(context.run.pins["release_id"])
