"""Reap: end what outlived its lease or its run on this node. Safe at any time, and twice.

The last line of defence, so it depends on no scheduler and believes no flag: it looks at the ledger's leases
and runs, and at the processes that are there, which it finds by their marks even when the ledger knows
nothing of them. A pool whose run is open, whose lease holds and whose keeper lives is not touched; nor is a
run that a stage on this node is acting for at this moment.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tasks.errors import Busy, StageError, StageFailed, Unavailable
from tasks.gpu import restore
from tasks.ledger import Claim, Ledger, leases, take
from tasks.ledger.leases import Lease
from tasks.ledger.runs import Known
from tasks.ledger.runs import known as known_run
from tasks.node import lock, processes
from tasks.node.processes import Process
from tasks.serving import keeper_process, leftovers, pools
from tasks.serving.pools import Attempt, Pool
from tasks.settings import Settings

log = logging.getLogger(__name__)

_LOCK_WAIT_S = 5.0
"""For the lock of a process that was ended just now."""


@dataclass(frozen=True)
class Reaped:
    """What was done about one run."""

    run_id: str
    why: str
    ended: tuple[int, ...] = ()
    """Pids of the keepers and workers that were ended."""
    pool_id: str | None = None
    """The pool that is recorded as ended now."""
    released: int | None = None
    """The lease that is given back."""
    missing: str = ""
    """Why it is not: what of the old layout could not be brought back. The next round tries again."""


@dataclass
class Report:
    """What a reaping found and did."""

    reaped: list[Reaped] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    """Run to the reason why it was not touched."""
    failed: dict[str, str] = field(default_factory=dict)
    """Run to what kept it from being ended; the others were looked at all the same."""

    @property
    def message(self) -> str:
        """One line for a person."""
        if not self.reaped:
            return f"nothing to reap; {len(self.left_alone)} run(s) left alone"
        return f"reaped {len(self.reaped)} run(s): " + "; ".join(
            f"{one.run_id} ({one.why})" + (f": {one.missing}" if one.missing else "") for one in self.reaped
        )


@dataclass(frozen=True)
class _Found:
    """What one run has on this node."""

    run_id: str
    run: Known | None
    pool: Pool | None
    lease: Lease | None
    processes: tuple[Process, ...]


def reap(settings: Settings, run_id: str | None = None, force: bool = False) -> Report:
    """End keepers, workers and leases of this node that nobody should hold any more.

    Args:
        run_id: look at this run only.
        force: end what this run has, however healthy: for a person who knows.

    Raises:
        Unavailable: the ledger does not answer, so nobody can tell what is over; keepers end by
            their own clock.
        StageFailed: something of some run does not end; what could be ended was.
    """
    report = Report()
    keeper_process.remove_abandoned(settings)
    with Ledger(settings.database_url(), settings.sql) as ledger:
        for name in sorted(_candidates(ledger, settings, run_id)):
            try:
                _look_after(name, ledger, settings, force and name == run_id, report)
            except Unavailable as error:
                # Raises it again where the ledger is away, and not only busy with this run.
                with ledger.transaction():
                    report.failed[name] = f"run {name}: {error}"
            except (StageError, OSError) as error:
                report.failed[name] = f"run {name}: {error}"
            except Exception as error:
                # A defect that one run brings out must not keep the devices of all others.
                log.exception("run %s could not be looked after", name)
                report.failed[name] = f"run {name}: {type(error).__name__}: {error}"
    if report.failed:
        raise StageFailed("\n".join([*report.failed.values(), f"(besides: {report.message})"]))
    return report


def _look_after(name: str, ledger: Ledger, settings: Settings, forced: bool, report: Report) -> None:
    with ExitStack() as stack:
        try:
            stack.enter_context(_nobody_acts_for(name, settings, forced))
        except Busy as error:
            report.left_alone[name] = str(error)
            return
        found = _look(ledger, settings, name)
        why = "a person asked for it" if forced else _why_over(found)
        if why is None:
            report.left_alone[name] = _why_left_alone(found)
        else:
            report.reaped.append(_end(ledger, settings, found, why))


@contextmanager
def _nobody_acts_for(run_id: str, settings: Settings, forced: bool) -> Iterator[None]:
    """Hold the lock that whoever provisions, starts, stops or restores for the run holds.

    Such a process is left alone, unless a person wants it to end, or it is stopped (state T): it could hold its
    devices for ever, and every stage survives a kill.

    Raises:
        Busy: somebody acts for the run.
    """
    path, purpose = settings.locks / f"{run_id}-devices.lock", f"reap of run {run_id}"
    with ExitStack() as stack:
        try:
            stack.enter_context(lock.held(path, purpose, wait_s=0.0))
        except Busy:
            holder = lock.holder(path)
            if holder is None or not (forced or holder.is_stopped()):
                raise
            log.warning("run %s: ending process %d, which acted for it", run_id, holder.pid)
            processes.end([holder], grace_s=0)
            stack.enter_context(lock.held(path, purpose, _LOCK_WAIT_S))
        yield


def _candidates(ledger: Ledger, settings: Settings, run_id: str | None) -> set[str]:
    if run_id is not None:
        return {run_id}
    return {
        *leftovers.runs(),
        *(pool.run_id for pool in pools.open_pools(ledger, settings.node)),
        *(lease.run_id for lease in leases.live_leases(ledger, settings.node)),
    }


def _look(ledger: Ledger, settings: Settings, run_id: str) -> _Found:
    pool = pools.open_pool(ledger, run_id)
    return _Found(
        run_id,
        known_run(ledger, run_id),
        pool if pool is not None and pool.node == settings.node else None,
        leases.lease_of(ledger, run_id, settings.node),
        tuple(pools.processes_of(ledger, run_id)),
    )


def _why_over(found: _Found) -> str | None:
    """Why what was found should end; None when it should not."""
    if not (found.processes or found.pool or found.lease):
        return None
    if found.run is None:
        return "the ledger knows no such run"
    if found.run.verdict is not None:
        return f"the run is closed ({found.run.verdict})"
    if found.lease is not None and found.lease.is_over:
        return f"its lease {'was abandoned' if found.lease.state == 'abandoned' else 'expired'}"
    if found.pool is None:
        return "its processes belong to no open pool" if found.processes else None
    if found.pool.wanted.lease_id is not None and found.lease is None:
        return "its lease was released"
    if found.pool.keeper is None or not found.pool.keeper.is_alive():
        # Nobody is starting it (the lock is ours), and nobody can parent its workers again.
        return "its keeper is dead"
    return None


def _why_left_alone(found: _Found) -> str:
    if not (found.processes or found.pool or found.lease):
        return "it holds nothing on this node"
    return "its run is open and its lease holds" + (" and its keeper lives" if found.pool else "")


def _end(ledger: Ledger, settings: Settings, found: _Found, why: str) -> Reaped:
    log.info("reaping run %s: %s", found.run_id, why)
    if found.run is None:
        _end_processes(found, [], settings)
        return Reaped(found.run_id, why, _pids(found))
    # Fenced first: a keeper that sleeps through its end must not write when it wakes up.
    claim, _ = take(ledger, found.run_id, "reap", frozenset({"reap", "keeper"}))
    try:
        _end_processes(found, pools.attempts(ledger, found.run_id), settings)
        if found.pool is not None:
            pools.end(claim, found.pool.pool_id, f"reaped: {why}")
        try:
            released, missing = _release(claim, settings, found, why), ""
        except (StageFailed, Busy) as error:
            released, missing = None, str(error)
        claim.finish("failed" if missing else "done", missing or why, {"processes": len(found.processes)})
    except (StageError, OSError) as error:
        with suppress(StageError):  # fenced, or the ledger is away: what happened before matters more
            claim.finish("failed", str(error), {})
        raise
    pool_id = found.pool.pool_id if found.pool else None
    return Reaped(found.run_id, why, _pids(found), pool_id, released, missing)


def _end_processes(found: _Found, attempts: list[Attempt], settings: Settings) -> None:
    survivors = leftovers.end(
        found.run_id,
        pools.leaders(attempts),
        found.pool.keeper if found.pool else None,
        keeper_grace_s=settings.drain_s + settings.stop_grace_s,
        held=pools.shared_memory(attempts),
    )
    if survivors:
        pids = ", ".join(str(process.pid) for process in survivors)
        raise StageFailed(
            f"process(es) {pids} of run {found.run_id} do not end, even after SIGKILL: its lease stays held; "
            f"look at /proc/PID/stack, then reap again"
        )


def _release(claim: Claim, settings: Settings, found: _Found, why: str) -> int | None:
    """Give the run's devices back, cut as they were before it; not when only its pool was sick.

    Raises:
        StageFailed: something of the old layout is missing: it is recorded, and the next round goes on.
        Busy: somebody cuts the node's GPUs at this moment; so does the next round.
    """
    if found.lease is None or why == "its keeper is dead":
        return None
    restore.give_back(claim, settings, found.lease, f"reaped: {why}")
    return found.lease.lease_id


def _pids(found: _Found) -> tuple[int, ...]:
    return tuple(process.pid for process in found.processes)


def as_facts(report: Report) -> dict[str, Any]:
    """The report for `--json`."""
    return {
        "reaped": [
            {
                "run_id": one.run_id,
                "why": one.why,
                "processes_ended": len(one.ended),
                "pool_id": one.pool_id,
                "lease_released": one.released,
                "missing": one.missing,
            }
            for one in report.reaped
        ],
        "left_alone": report.left_alone,
    }
