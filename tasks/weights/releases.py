"""The releases of a node: what there is, whether one is as its manifest says, and removing one.

Keeps: nothing that a run needs is removed. A release in use is named with its users; making it, mending it and
removing it hold the same node lock; and it goes by one rename, so that nobody sees half of one.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import Busy, InputError, StageFailed
from tasks.ledger import Ledger, take
from tasks.node import lock
from tasks.settings import Settings
from tasks.weights import store
from tasks.weights.store import Manifest

_LOCK_WAIT_S = 5.0


@dataclass(frozen=True)
class Release:
    """One release of the store."""

    release_id: str
    path: Path
    manifest: Manifest
    users: tuple[str, ...]
    """Runs that are open and pinned to it."""
    served_by: tuple[str, ...]
    """Those of them whose workers serve it now."""

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        about = self.manifest.about
        return {
            "release_id": self.release_id,
            "path": str(self.path),
            "bytes": self.manifest.bytes,
            "files": len(self.manifest.files),
            "fingerprint": about["fingerprint"],
            "metrics": about["metrics"],
            "users": list(self.users),
            "served_by": list(self.served_by),
        }


def listing(settings: Settings, ledger: Ledger) -> list[Release]:
    """Every release in the store, by its manifest: nothing is hashed."""
    return [_release(name, manifest, settings, ledger) for name, manifest in store.releases(settings).items()]


def verify(release_id: str, settings: Settings, ledger: Ledger) -> Release:
    """Read every byte of a release and compare it with its manifest.

    Raises:
        InputError: there is no such release.
        StageFailed: names the files that are missing, changed, or not of it.
    """
    release = _find(release_id, settings, ledger)
    wrong = store.wrong_files(release.path, release.manifest, settings, distrust=True)
    if wrong:
        raise StageFailed(
            f"release {release_id} is not as its manifest says: {', '.join(wrong)}. The stage convert of a run that "
            f"wants it mends it, or makes it again"
        )
    return release


def remove(release_id: str, settings: Settings, ledger: Ledger, *, force: bool) -> Release:
    """Delete a release that nobody needs.

    Args:
        force: even if an open run is pinned to it; never while it is served.

    Raises:
        InputError: there is no such release.
        Busy: it is being made or mended, or runs need it; names them.
    """
    purpose = f"removal of release {release_id}"
    with lock.held(settings.locks / f"release-{release_id}.lock", purpose, _LOCK_WAIT_S):
        release = _find(release_id, settings, ledger)
        _refuse_used(release, force)
        _record(release_id, settings, ledger)
        away = settings.store / "staging" / f"{release_id}.removed"
        away.parent.mkdir(parents=True, exist_ok=True)
        store.remove(away)
        os.rename(release.path, away)
        store.remove(away)
    return release


def _refuse_used(release: Release, force: bool) -> None:
    if release.served_by:
        raise Busy(
            f"release {release.release_id} is served by the workers of run {', '.join(release.served_by)}: end "
            f"them first (the stages stop and restore)"
        )
    if release.users and not force:
        raise Busy(
            f"release {release.release_id} is what the open run {', '.join(release.users)} is pinned to: let it "
            f"end, or remove the release with --force; the run would make it again"
        )


def _find(release_id: str, settings: Settings, ledger: Ledger) -> Release:
    found = store.releases(settings)
    if release_id not in found:
        known = ", ".join(found) or "none"
        raise InputError(f"there is no release {release_id!r} in {settings.store}; there are: {known}")
    return _release(release_id, found[release_id], settings, ledger)


def _release(release_id: str, manifest: Manifest, settings: Settings, ledger: Ledger) -> Release:
    with ledger.transaction() as connection:
        rows = list(ledger.queries.users_of_release(connection, node=settings.node, release_id=release_id))
    users = tuple(str(row["run_id"]) for row in rows)
    served_by = tuple(str(row["run_id"]) for row in rows if row["is_served"])
    return Release(release_id, store.release_folder(settings, release_id), manifest, users, served_by)


def _record(release_id: str, settings: Settings, ledger: Ledger) -> None:
    """Before the files go: killed in between, the ledger forgets a release that the next run finds and records."""
    with ledger.transaction() as connection:
        maker = ledger.queries.maker_of_release(connection, node=settings.node, release_id=release_id)
    if maker is None:
        return
    claim, _ = take(ledger, str(maker), "remove", frozenset())
    with claim.writing() as connection:
        ledger.queries.remove_release(connection, node=settings.node, release_id=release_id)
    claim.finish("done", f"release {release_id} is being removed", {})
