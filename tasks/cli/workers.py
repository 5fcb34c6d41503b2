"""Workers of a run for a person: their states, and their logs, wherever those are."""

import asyncio
from pathlib import Path
from typing import Any

from tasks import pool_key
from tasks.errors import InputError, StageError
from tasks.ledger import Ledger
from tasks.serving import log_files, probes
from tasks.settings import Settings


def workers_of(ledger: Ledger, run_id: str) -> list[dict[str, Any]]:
    """The newest start of each worker of the run's newest pool, as the ledger knows it."""
    with ledger.transaction() as connection:
        return list(ledger.queries.newest_workers_of_run(connection, run_id=run_id))


def as_text(workers: list[dict[str, Any]]) -> list[str]:
    """A line for each."""
    lines = []
    for one in workers:
        lines.append(
            f"  {one['worker_id']:<10} {one['state']:<14} start {one['attempt']}, "
            f"{one['changed_at']:%H:%M:%S} UTC: {one['evidence'].splitlines()[0] if one['evidence'] else ''}"
        )
    if workers and workers[0]["pool_ended_at"] is not None:
        lines.append(f"  the pool {workers[0]['pool_id']} has ended: {workers[0]['pool_reason']}")
    return lines


def read_log(ledger: Ledger, run_id: str, worker_id: str, lines: int, settings: Settings) -> str:
    """The newest lines of a worker's log, or of `keeper`'s: from its keeper while that lives, else its file.

    Raises:
        InputError: the run has no such worker, or its log is on another node.
    """
    workers = workers_of(ledger, run_id)
    named = {one["worker_id"]: one for one in workers}
    if not workers or worker_id not in {*named, "keeper"}:
        known = ", ".join(["keeper", *named]) if workers else "none: it has no pool yet"
        raise InputError(f"run {run_id} has no worker {worker_id!r}; there is {known}")
    pool = workers[0]
    if pool["pool_ended_at"] is None and pool["registry"]:
        try:
            key = pool_key.derive(settings.secret(), pool["pool_id"])
            return asyncio.run(_ask(pool["registry"], key, worker_id, lines))
        except (probes.NoAnswer, StageError):
            pass  # the keeper has just ended, or this host may not ask it: its file says the same
    log = Path(named[worker_id]["log"]) if worker_id in named else Path(pool["log"]).with_name("keeper.log")
    found = log_files.tail(log, lines)
    if not found and not log.exists():
        raise InputError(
            f"the log of {worker_id} of run {run_id} is {log} on node {pool['node']}, and its keeper does not "
            f"answer from here: read it there"
        )
    return "\n".join(found)


async def _ask(registry: str, key: str, worker_id: str, lines: int) -> str:
    async with probes.session(key) as client:
        return await probes.log_of(client, registry, worker_id, lines)
