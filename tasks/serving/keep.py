"""A pool that somebody keeps: whether it still serves, and why not.

The keeper does the keeping: it renews the lease, replaces its workers and ends with its run's deadline. Whoever
calls this only looks, so that a pool whose keeper died is started again and one that was stopped is not.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from tasks import pool_key
from tasks.errors import StageFailed
from tasks.ledger import Ledger, Run, leases
from tasks.serving import pools, probes, standing
from tasks.settings import Settings

_ASKS = 3
_BY_A_PERSON = ("stopped", "reaped: a person asked for it")


class State(Enum):
    """How a kept pool is."""

    SERVES = "serves"
    OVER = "over"
    """Its time is up, or somebody stopped it."""
    BROKEN = "broken"
    """It ended, and nobody wanted that."""


@dataclass(frozen=True)
class Kept:
    """What a look found."""

    state: State
    says: str


def look(ledger: Ledger, run: Run, settings: Settings) -> Kept:
    """How the run's pool stands now; on its node, where its keeper's process can be seen.

    Raises:
        StageFailed: its time is over, and it never had a pool in it.
    """
    if datetime.now(UTC) >= run.deadline:
        until = f"{run.deadline.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        if not pools.had_one(ledger, run.run_id, run.due_from):
            raise StageFailed(
                f"the pool's time was over ({until}) before it got devices, so nobody could query it: clear the run, "
                f"for which `until` then counts anew, or start one with a later `until`; `qwen-pipeline status` shows "
                f"who holds the devices"
            )
        return Kept(State.OVER, f"the time of the pool is over ({until})")
    pool = pools.open_pool(ledger, run.run_id)
    if pool is None:
        why = pools.why_ended(ledger, run.run_id) or "it was never started"
        if why in _BY_A_PERSON:
            return Kept(State.OVER, f"the pool was stopped ({why})")
        return Kept(State.BROKEN, f"the pool has ended: {why}")
    if leases.lease_of(ledger, run.run_id, pool.node) is None:
        return Kept(State.OVER, "the pool's devices were given back")
    try:
        now = standing.ask(pool, pool_key.derive(settings.secret(), pool.pool_id), tries=_ASKS)
    except probes.NoAnswer as error:
        return Kept(State.BROKEN, f"its keeper does not answer: {error}")
    if now.draining:
        return Kept(State.BROKEN, "its keeper is ending it")
    ready = len(now.workers) - len(now.unready)
    return Kept(State.SERVES, f"{ready} of {len(now.workers)} worker(s) serve {pool.wanted.release_id}")
