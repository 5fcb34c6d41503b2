"""`qwen-pipeline releases`: what there is, whether one is as its manifest says, and removing one."""

from typing import Any

from tasks.ledger import Ledger
from tasks.settings import Settings
from tasks.weights import releases
from tasks.weights.releases import Release


def listing(settings: Settings) -> tuple[dict[str, Any], str]:
    """The releases of this node: as a document and as text."""
    with Ledger(settings.database_url(), settings.sql) as ledger:
        found = releases.listing(settings, ledger)
    document = {"node": settings.node, "releases": [release.facts() for release in found]}
    if not found:
        return document, f"there is no release in {settings.store}"
    lines = [f"{'release':<56} {'GB':>7} {'KL':>9}  {'made by':<10} users"]
    lines += [_line(release) for release in found]
    return document, "\n".join(lines)


def verify(settings: Settings, release_id: str) -> tuple[dict[str, Any], str]:
    """Every byte of one release against its manifest."""
    with Ledger(settings.database_url(), settings.sql) as ledger:
        found = releases.verify(release_id, settings, ledger)
    size = f"{found.manifest.bytes / 1e9:.2f} GB"
    return found.facts(), f"release {release_id}: all {len(found.manifest.files)} files are right, {size}"


def remove(settings: Settings, release_id: str, *, force: bool) -> tuple[dict[str, Any], str]:
    """Delete one release that nobody needs."""
    with Ledger(settings.database_url(), settings.sql) as ledger:
        found = releases.remove(release_id, settings, ledger, force=force)
    return found.facts(), f"release {release_id} is removed; {found.manifest.bytes / 1e9:.2f} GB"


def _line(release: Release) -> str:
    metrics = release.manifest.about["metrics"]
    kl = f"{metrics['kl']:.3g}" if "kl" in metrics else "-"
    made_by = metrics.get("made_by", "none")
    users = ", ".join(release.users) or "-"
    return f"{release.release_id:<56} {release.manifest.bytes / 1e9:>7.2f} {kl:>9}  {made_by:<10} {users}"
