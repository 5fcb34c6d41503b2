"""What runs of a batch worked with, prepared rows and segments, goes some time after all of the batch is published.

From then on its published files say what is answered, and a run of it prepares its input again.
"""

import logging
import shutil
from contextlib import suppress
from pathlib import Path

from tasks.ledger import Claim, Ledger
from tasks.ledger.connection import Connection

log = logging.getLogger(__name__)


def past(ledger: Ledger, retention_s: float) -> list[str]:
    """Ids of batches that were published whole so long ago, and that no open run counts on."""
    with ledger.transaction() as connection:
        return _past(ledger, connection, retention_s)


def remove(claim: Claim, batch_id: str, retention_s: float) -> None:
    """Remove the batch's folders, unless somebody counts on them since `past` named it.

    The files go before the commit: a writer, who waits for the batch's lock, must not take a segment over that is
    about to go, and after a kill the ledger still names the batch.

    Raises:
        Fenced: the claim has ended.
    """
    with claim.writing() as connection:
        queries = claim.ledger.queries
        queries.lock_batch(connection, batch_id=batch_id)
        if batch_id not in _past(claim.ledger, connection, retention_s):
            return
        for row in queries.folders_of_batch(connection, batch_id=batch_id):
            try:
                _remove(Path(row["folder"]))
            except OSError as error:
                # No reason for a run of another batch to fail; the next one tries again.
                log.warning("what runs of batch %s worked with is not removed: %s", batch_id, error)
                return
        queries.delete_segments_of_batch(connection, batch_id=batch_id)
        queries.set_batch_cleared(connection, batch_id=batch_id)


def _past(ledger: Ledger, connection: Connection, retention_s: float) -> list[str]:
    rows = ledger.queries.batches_past_retention(connection, retention_s=retention_s)
    return [row["batch_id"] for row in rows]


def _remove(folder: Path) -> None:
    # Out of the way in one step: a run that begins to prepare meanwhile must not find half of it.
    gone = folder.with_name(f".removed-{folder.name}")
    with suppress(FileNotFoundError):  # none is left by a kill
        shutil.rmtree(gone)
    with suppress(FileNotFoundError):  # its output is gone
        folder.rename(gone)
        shutil.rmtree(gone)
