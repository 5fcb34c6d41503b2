"""One writer to a batch: how a stage becomes it, and what happens to one that was killed."""

import logging

from tasks.batch import in_ledger
from tasks.contract import Context
from tasks.ledger import take
from tasks.ledger.claims import Holder
from tasks.node import processes

log = logging.getLogger(__name__)


def become_writer(context: Context, batch_id: str) -> Holder | None:
    """Become the batch's writer, in the place of one whose process is gone; or say who writes to it now."""
    while (other := in_ledger.become_writer(context.claim, batch_id)) is not None:
        if not other.is_gone:
            return other
        _end_abandoned(context, other)
    return None


def _end_abandoned(context: Context, other: Holder) -> None:
    """A killed stage of another run still has its claim: claim it for that run, and record that it failed.

    Its children may live on for a moment and write under the claim, so it is ended before they are.
    """
    log.info("run %s was killed while it worked on this batch; its claim is ended", other.run_id)
    ledger = context.claim.ledger
    claim, _ = take(ledger, other.run_id, other.stage, frozenset({other.stage}))
    processes.end_all(lambda: processes.find(f"{other.run_id}/{other.stage}"), grace_s=0)
    claim.finish("failed", f"its process was killed; run {context.run.run_id} went on with the batch", {})
