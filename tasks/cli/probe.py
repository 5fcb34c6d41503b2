"""`qwen-pipeline status --probe`: is this node as the ledger says? For service managers; changes nothing."""

from dataclasses import dataclass
from typing import Any

from tasks import pool_key
from tasks.errors import StageFailed
from tasks.ledger import Ledger, leases
from tasks.serving import leftovers, pools, probes, standing
from tasks.serving.pools import Pool
from tasks.settings import Settings

_ASKS = 2


@dataclass(frozen=True)
class _Found:
    problems: tuple[str, ...]
    pools: int
    workers: int


def probe(settings: Settings) -> tuple[dict[str, Any], str]:
    """That what is open on this node lives, and that nothing lives that should not.

    Raises:
        Unavailable: the ledger does not answer.
        StageFailed: names all that is wrong.
    """
    with Ledger(settings.database_url(), settings.sql, patience_s=5.0) as ledger:
        found = _look(ledger, settings)
    if found.problems:
        raise StageFailed(
            "\n".join([f"{len(found.problems)} problem(s) on {settings.node}:", *found.problems])
        )
    document = {"node": settings.node, "ok": True, "pools": found.pools, "workers_ready": found.workers}
    return document, f"{settings.node}: well; {found.pools} pool(s), {found.workers} worker(s) ready"


def _look(ledger: Ledger, settings: Settings) -> _Found:
    problems = [
        f"  lease {lease.lease_id} of run {lease.run_id} is over and not released: `qwen-pipeline reap`"
        for lease in leases.live_leases(ledger, settings.node)
        if lease.is_over
    ]
    there = pools.open_pools(ledger, settings.node)
    ready = 0
    for pool in there:
        try:
            ready += _ready(pool, settings)
        except probes.NoAnswer as error:
            problems.append(f"  pool {pool.pool_id}: {error}")
    for run_id in sorted(leftovers.runs() - {pool.run_id for pool in there}):
        problems.append(f"  processes of run {run_id} live although it has no pool: `qwen-pipeline reap`")
    return _Found(tuple(problems), len(there), ready)


def _ready(pool: Pool, settings: Settings) -> int:
    """Workers of the pool that serve; a pool that is only starting has none, and that is no problem."""
    if pool.keeper is None:
        return 0  # intended a moment ago; when its stage was killed, the reaper sees to it
    if not pool.keeper.is_alive():
        raise probes.NoAnswer("its keeper is dead: run the stage start again, or `qwen-pipeline reap`")
    now = standing.ask(pool, pool_key.derive(settings.secret(), pool.pool_id), tries=_ASKS)
    bad = [worker for worker in now.workers if worker["given_up"] or worker["state"] in ("suspect", "dead")]
    if bad:
        raise probes.NoAnswer(
            "; ".join(f"{worker['worker_id']} is {worker['state']}: {worker['message']}" for worker in bad)
        )
    return len(now.workers) - len(now.unready)
