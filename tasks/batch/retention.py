"""What runs of a batch worked with, prepared rows and segments, goes some time after all of the batch is published.

From then on its published files say what is answered, and a run of it prepares its input again.

Keeps:
- a run that begins meanwhile finds all of it or nothing: it is moved away in one step, under the batch's lock;
- nobody waits while it is deleted, which can take long;
- what a kill leaves, the next removal finishes: the batch counts as cleared once nothing is left.
"""

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from secrets import token_hex

from tasks.ledger import Claim, Ledger
from tasks.ledger.connection import Connection

log = logging.getLogger(__name__)

_AT_ONCE = 20
"""Batches that one `publish` removes. It is somebody's run: the next one goes on."""


def past(ledger: Ledger, retention_s: float) -> list[str]:
    """Ids of batches that were published whole so long ago, and that no run has counted on since; oldest first."""
    with ledger.transaction() as connection:
        return _past(ledger, connection, retention_s)


def remove(claim: Claim, batch_id: str, retention_s: float) -> None:
    """Remove the batch's folders, unless somebody counts on them since `past` named it, or removes them too.

    What cannot be removed is said in the log, and tried again by the next.

    Raises:
        Fenced: the claim has ended.
    """
    queries = claim.ledger.queries
    try:
        with claim.writing() as connection:
            if not _may_go(claim, connection, batch_id, retention_s):
                return
            folders = [Path(row["folder"]) for row in queries.folders_of_batch(connection, batch_id=batch_id)]
            queries.delete_segments_of_batch(connection, batch_id=batch_id)
            gone = _move_away(folders)
    except OSError as error:
        log.warning("what runs of batch %s worked with cannot be removed: %s", batch_id, error)
        return
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    if left := [str(path) for path in gone if path.exists()]:
        log.warning("what runs of batch %s worked with is not all removed: %s", batch_id, ", ".join(left))
        return
    with claim.writing() as connection:
        if _may_go(claim, connection, batch_id, retention_s):
            queries.set_batch_cleared(connection, batch_id=batch_id)


def _past(
    ledger: Ledger, connection: Connection, retention_s: float, batch_id: str | None = None
) -> list[str]:
    rows = ledger.queries.batches_past_retention(
        connection, retention_s=retention_s, batch_id=batch_id, most=_AT_ONCE
    )
    return [row["batch_id"] for row in rows]


def _may_go(claim: Claim, connection: Connection, batch_id: str, retention_s: float) -> bool:
    """Whether this transaction has the batch's lock, and the batch is still past its retention."""
    if claim.ledger.queries.lock_idle_batch(connection, batch_id=batch_id) is None:
        return False
    return bool(_past(claim.ledger, connection, retention_s, batch_id))


def _move_away(folders: Iterable[Path]) -> list[Path]:
    """Where they lie now, and what an earlier removal left there; whose output is gone is gone with it."""
    gone: list[Path] = []
    for folder in folders:
        if folder.exists():
            folder.rename(folder.with_name(f".removed-{folder.name}-{token_hex(4)}"))
        gone += folder.parent.glob(f".removed-{folder.name}-*")
    return gone
