"""The processes of a run's pool, found without asking anybody: by the marks in their environment, by session.

Two ways, because each has a hole. A process can overwrite its environment, and a killed API server leaves an
engine behind that the ledger does not know; but a session's number is that of its leader, and all that a
worker forks stays in it.
"""

import re
from collections.abc import Iterable

from tasks.node import processes
from tasks.node.processes import Process
from tasks.serving import scratch, shared_memory

_POOL_PART = re.compile(r"^(?P<run_id>.+)/(?P<what>keeper|worker-\d+)$")


def keepers(run_id: str) -> list[Process]:
    """Keepers of the run on this host."""
    return processes.find(f"{run_id}/keeper")


def workers(run_id: str, leaders: Iterable[Process] = ()) -> list[Process]:
    """Servers of the run on this host, and all that they forked.

    Args:
        leaders: the servers in the ledger, living or dead.
    """
    marked = {
        process
        for process in processes.find(run_id)
        if (part := processes.part_of(process)) is not None and part.startswith(f"{run_id}/worker-")
    }
    return sorted(marked.union(*(processes.session_of(leader) for leader in leaders)))


def worker(run_id: str, worker_id: str, leader: Process | None) -> list[Process]:
    """One server and all that it forked."""
    marked = processes.find(f"{run_id}/{worker_id}")
    return sorted({*marked, *(processes.session_of(leader) if leader else ())})


def runs() -> set[str]:
    """Runs, known to the ledger or not, of which a keeper or a worker lives on this host."""
    found = set()
    for process in processes.find():
        match = _POOL_PART.match(processes.part_of(process) or "")
        if match:
            found.add(match["run_id"])
    return found


def end(
    run_id: str,
    leaders: Iterable[Process],
    keeper: Process | None,
    keeper_grace_s: float,
    held: Iterable[str] = (),
) -> list[Process]:
    """End a run's keepers, then its workers; returns what does not end, which is normally nothing.

    Args:
        keeper: the one in the ledger, in case it has lost its marks.
        keeper_grace_s: a keeper that is asked to end drains its workers and stops them itself.
        held: files in /dev/shm that its servers are known to have had open.
    """
    known = list(leaders)
    held = {*held, *shared_memory.held_by(workers(run_id, known))}
    survivors = processes.end({*keepers(run_id), *([keeper] if keeper else [])}, keeper_grace_s)
    survivors += processes.end_all(lambda: keepers(run_id), grace_s=0)
    # What is left now had no time to end by itself, or has hung: there is nothing to wait for.
    survivors += processes.end_all(lambda: workers(run_id, known), grace_s=0)
    if not survivors:
        shared_memory.remove(held)
        scratch.remove(scratch.of_run(run_id))
    return survivors
