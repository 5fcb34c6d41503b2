"""The run's pool as the ledger has it. One that has ended does not come back, so nobody waits for its workers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tasks.errors import StageFailed
from tasks.ledger import Claim, Ledger
from tasks.ledger.claims import facts_of
from tasks.watch import calling


def of_run(ledger: Ledger, run_id: str) -> dict[str, Any]:
    """What the stage start found out about the pool that it started.

    Raises:
        StageFailed: it started none, or the pool has ended since.
    """
    facts = facts_of(ledger, run_id, "start")
    if facts is None or facts["pool_id"] is None:
        raise StageFailed("rows are to do, but no pool of workers runs: run the stage start")
    reason = _why_ended(ledger, facts["pool_id"])
    if reason is not None:
        raise StageFailed(
            f"rows are to do, but the run's pool of workers has ended ({reason}); what is answered is kept: start the "
            f"run again, or run the stages provision, start and run"
        )
    return facts


@contextmanager
def watched(claim: Claim, pool_id: str, every_s: float, on_end: Callable[[], None]) -> Iterator[None]:
    """For the length of the block, call `on_end` again and again once the pool has ended."""

    def has_ended(own: Claim) -> bool:
        return _why_ended(own.ledger, pool_id) is not None

    with calling(claim, every_s, has_ended, on_end, name="watch-pool"):
        yield


def _why_ended(ledger: Ledger, pool_id: str) -> str | None:
    """None while it has not."""
    with ledger.transaction() as connection:
        row = ledger.queries.pool_by_id(connection, pool_id=pool_id)
    return None if row is None else row["reason"]
