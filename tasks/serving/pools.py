"""Pools in the ledger: what was intended, and what was started.

Intent is written before a process exists, the process after; both by whoever starts it, under its claim.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from psycopg.types.json import Jsonb

from tasks.ledger import Claim, Ledger
from tasks.ledger.connection import Connection
from tasks.node.processes import Process
from tasks.serving import leftovers
from tasks.serving.launch import Slot


@dataclass(frozen=True)
class Wanted:
    """What a pool is made of; two pools that agree in this are interchangeable."""

    release_id: str
    release_path: Path
    slots: tuple[Slot, ...]
    lease_id: int | None
    """None where no device is leased: the pool then lives by its keeper's claim alone."""


@dataclass(frozen=True)
class Pool:
    """A pool as the ledger holds it."""

    pool_id: str
    run_id: str
    node: str
    wanted: Wanted
    registry: str | None
    """None until the keeper answers there."""
    keeper: Process | None
    """None until the keeper has written itself down."""
    ended: bool
    memory_before: Mapping[str, int] = field(default_factory=dict)
    """UUID of each device to the bytes that were in use on it before the pool."""


@dataclass(frozen=True)
class Attempt:
    """One start of one worker."""

    pool_id: str
    worker_id: str
    attempt: int
    port: int
    state: str
    """As its keeper wrote last: `dead` for one that was replaced, or given up."""
    leader: Process | None
    """The server; its session is that of all it forked. None: intended, perhaps never started."""
    shared_memory: tuple[str, ...] = ()
    """Files in /dev/shm that its processes had open when it was ready."""
    is_over: bool = False
    """Whether its pool is recorded as ended: whoever wrote that had looked, and nothing of it was left."""


def intend(
    claim: Claim, pool_id: str, node: str, wanted: Wanted, memory_before: Mapping[str, int] | None = None
) -> None:
    """Write down that a keeper is about to be started for this pool."""
    with claim.writing() as connection:
        claim.ledger.queries.intend_pool(
            connection,
            pool_id=pool_id,
            run_id=claim.run_id,
            node=node,
            lease_id=wanted.lease_id,
            release_id=wanted.release_id,
            release_path=str(wanted.release_path),
            slots=Jsonb([slot.as_facts() for slot in wanted.slots]),
            memory_before=Jsonb(dict(memory_before or {})),
        )


def end(claim: Claim, pool_id: str, reason: str) -> None:
    """Write down that nothing of the pool is left; whoever calls this has looked."""
    with claim.writing() as connection:
        claim.ledger.queries.end_workers_of_pool(connection, pool_id=pool_id, evidence=reason)
        claim.ledger.queries.end_pool(connection, pool_id=pool_id, reason=reason)


def load(ledger: Ledger, pool_id: str) -> Pool | None:
    """The pool of that id."""
    with ledger.transaction() as connection:
        row = ledger.queries.pool_by_id(connection, pool_id=pool_id)
    return _pool(row) if row else None


def open_pool(ledger: Ledger, run_id: str) -> Pool | None:
    """The run's pool that nobody has ended in the ledger; its processes may be gone all the same."""
    with ledger.transaction() as connection:
        row = ledger.queries.open_pool_of_run(connection, run_id=run_id)
    return _pool(row) if row else None


def why_ended(ledger: Ledger, run_id: str) -> str | None:
    """Why the run's newest pool ended; None where it has not, or there was none."""
    with ledger.transaction() as connection:
        reason = ledger.queries.why_newest_pool_ended(connection, run_id=run_id)
    return None if reason is None else str(reason)


def had_one(ledger: Ledger, run_id: str, since: datetime) -> bool:
    """Whether the run has a pool, or had one at some time since then."""
    with ledger.transaction() as connection:
        return bool(ledger.queries.run_had_pool(connection, run_id=run_id, since=since))


def open_pools(ledger: Ledger, node: str) -> list[Pool]:
    """Every run's open pool on the node."""
    with ledger.transaction() as connection:
        return [_pool(row) for row in ledger.queries.open_pools_of_node(connection, node=node)]


def attempts(ledger: Ledger, run_id: str) -> list[Attempt]:
    """Every worker that was ever started, or about to be, for the run; the newest last."""
    with ledger.transaction() as connection:
        rows = list(ledger.queries.workers_of_run(connection, run_id=run_id))
    return [
        Attempt(
            row["pool_id"],
            row["worker_id"],
            row["attempt"],
            row["first_port"],
            row["state"],
            _process(row),
            tuple(row["shared_memory"]),
            row["pool_ended"],
        )
        for row in rows
    ]


def processes_of(ledger: Ledger, run_id: str) -> list[Process]:
    """Living keepers and workers of the run on this host, and all that those forked; known to the ledger or not."""
    there = open_pool(ledger, run_id)
    known = {there.keeper} if there is not None and there.keeper and there.keeper.is_alive() else set()
    keepers = sorted(known.union(leftovers.keepers(run_id)))
    return [*keepers, *leftovers.workers(run_id, leaders(attempts(ledger, run_id)))]


def ports_of_other_runs(ledger: Ledger, node: str, run_id: str) -> set[int]:
    """Ports on which workers of other runs' open pools listen."""
    with ledger.transaction() as connection:
        rows = ledger.queries.ports_of_other_runs(connection, node=node, run_id=run_id)
        return {row["first_port"] for row in rows}


def run_is_open(connection: Connection, claim: Claim) -> bool:
    """Whether nobody has closed the claim's run."""
    return bool(claim.ledger.queries.run_is_open(connection, run_id=claim.run_id))


def leaders(found: Iterable[Attempt]) -> list[Process]:
    """The servers that were started, as far as they are written down; not those of pools that have ended.

    The number of a session that is over may come back as another program's, whose leader is gone as well.
    """
    return [attempt.leader for attempt in found if attempt.leader is not None and not attempt.is_over]


def shared_memory(found: Iterable[Attempt]) -> set[str]:
    """What this boot's servers had open in /dev/shm, as far as it is written down."""
    return {
        path
        for attempt in found
        if attempt.leader is not None and attempt.leader.is_local() and not attempt.is_over
        for path in attempt.shared_memory
    }


def _pool(row: Mapping[str, Any]) -> Pool:
    slots = tuple(Slot.from_facts(slot) for slot in row["slots"])
    wanted = Wanted(row["release_id"], Path(row["release_path"]), slots, row["lease_id"])
    ended = row["ended_at"] is not None
    return Pool(
        row["pool_id"],
        row["run_id"],
        row["node"],
        wanted,
        row["registry"],
        _process(row),
        ended,
        row["memory_before"],
    )


def _process(row: Mapping[str, Any]) -> Process | None:
    if row["pid"] is None:
        return None
    return Process(row["pid"], row["start_ticks"], row["boot_id"], row["host"])
