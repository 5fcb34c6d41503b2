"""Stage `stop`: no process of the pool is left, its ports are free, and only then is it recorded as ended.

Works on whatever there is: a healthy keeper, which drains and stops its workers itself; a dead one's servers;
a server whose API process was killed and whose engine lives on; one that is still starting.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

from tasks.contract import Context, Outcome
from tasks.errors import StageFailed
from tasks.node.processes import Process
from tasks.serving import device_memory, leftovers, pools, ports, shared_memory
from tasks.serving.pools import Attempt, Pool

_PORTS_WAIT_S = 5.0
_MEMORY_WAIT_S = 10.0
_POLL_S = 0.05

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What there is to end."""

    processes: tuple[Process, ...]
    pool: Pool | None
    """The pool that is open in the ledger, with or without processes."""

    @property
    def satisfied(self) -> bool:
        """Whether nothing is there."""
        return not self.processes and self.pool is None

    @property
    def reason(self) -> str:
        """What will be ended."""
        if self.satisfied:
            return "no pool is running"
        name = f"pool {self.pool.pool_id}" if self.pool else "a pool that the ledger does not know"
        return f"end {name}: {len(self.processes)} process(es)"


def plan(context: Context) -> Plan:
    """What of a pool of this run is there."""
    run_id, ledger = context.run.run_id, context.claim.ledger
    return Plan(tuple(pools.processes_of(ledger, run_id)), pools.open_pool(ledger, run_id))


def apply(plan: Plan, context: Context) -> None:
    """End the keeper, then whatever it could not end; then look, and only then write it down.

    Raises:
        StageFailed: something does not end, or still listens.
    """
    run_id, settings, ledger = context.run.run_id, context.settings, context.claim.ledger
    attempts = pools.attempts(ledger, run_id)
    leftovers.end(
        run_id,
        pools.leaders(attempts),
        plan.pool.keeper if plan.pool else None,
        keeper_grace_s=settings.drain_s + settings.stop_grace_s,
        held=pools.shared_memory(attempts),
    )
    _nothing_is_left(context)
    if plan.pool is not None:
        _ports_are_free(context, plan.pool, attempts)
        _memory_is_back(context, plan.pool)
        pools.end(context.claim, plan.pool.pool_id, "stopped")


def verify(context: Context) -> Outcome:
    """The world again: no process of a pool of this run.

    Raises:
        StageFailed: there is one.
    """
    _nothing_is_left(context)
    facts: dict[str, Any] = {"processes": 0}
    return Outcome("no process of the pool is left and its ports are free", facts)


def _nothing_is_left(context: Context) -> None:
    left = pools.processes_of(context.claim.ledger, context.run.run_id)
    attempts = pools.attempts(context.claim.ledger, context.run.run_id)
    kept = shared_memory.remove(pools.shared_memory(attempts))
    if kept and not left:
        log.warning("%s stay: processes of somebody else have them open", ", ".join(kept))
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise StageFailed(
            f"process(es) {pids} of the pool of run {context.run.run_id} do not end, not even after SIGKILL: "
            f"they hang in the kernel (a driver or a file system); look at /proc/PID/stack"
        )


def _ports_are_free(context: Context, pool: Pool, attempts: list[Attempt]) -> None:
    """That nobody listens any more where the pool's workers did, unless another pool got the port since.

    The port of a dead start was let go, for anybody to take, long before the pool was stopped.
    """
    ours = {
        attempt.port for attempt in attempts if attempt.pool_id == pool.pool_id and attempt.state != "dead"
    }
    deadline = time.monotonic() + _PORTS_WAIT_S
    while held := set(ports.occupied(sorted(ours))):
        if held <= pools.ports_of_other_runs(context.claim.ledger, context.settings.node, pool.run_id):
            return
        if time.monotonic() > deadline:
            numbers = ", ".join(map(str, sorted(held)))
            raise StageFailed(
                f"port(s) {numbers} of the pool are still listened on, by a process "
                f"that does not carry its marks: `ss -tlnp` names it"
            )
        time.sleep(_POLL_S)


def _memory_is_back(context: Context, pool: Pool) -> None:
    """That the devices' memory is as it was before the pool, unless others took it: those are named."""
    differs, named = device_memory.wait_until_back(pool.memory_before, context.settings, _MEMORY_WAIT_S)
    if differs and named:
        log.warning("no process of pool %s is left, but others use its devices: %s", pool.pool_id, differs)
    elif differs:
        raise StageFailed(
            f"no process of pool {pool.pool_id} is left, and yet its memory is not back: {differs}; look at "
            f"`nvidia-smi`, and reset the GPU when nobody uses it"
        )
