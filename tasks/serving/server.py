"""One vLLM server as a process: spawned, its exit noticed at once, ended with all that it forked.

Everything here but the waiting runs in the keeper's main thread, because the kernel ends a tied child with
the *thread* that started it.
"""

import asyncio
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import Remedy
from tasks.node import processes
from tasks.node.processes import Process
from tasks.serving import (
    diagnosis,
    flags,
    launch,
    leftovers,
    log_files,
    ports,
    scratch,
    shared_memory,
    timeline,
)
from tasks.serving.diagnosis import Diagnosis
from tasks.serving.launch import Slot
from tasks.serving.line import now_s
from tasks.serving.prewarm import Shapes
from tasks.settings import Settings
from tasks.spec import Serving

_START_LINES = 3000

_ENGINE_TITLE = "VLLM::"
"""Of the processes that vLLM names: the engine, and one for each rank (`vllm/utils/system_utils.py`)."""


@dataclass(frozen=True)
class Job:
    """What all workers of a pool have in common."""

    pool_id: str
    run_id: str
    release_id: str
    release_path: Path
    serving: Serving
    key: str
    settings: Settings
    shapes: Shapes
    """Of the batch, for the first requests."""

    def log(self, worker_id: str) -> Path:
        """Where a worker's output goes, of all its attempts."""
        return self.settings.logs / self.run_id / f"{worker_id}.log"


def command(job: Job, slot: Slot, block: ports.Block) -> list[str]:
    """The whole command line; it holds no secret."""
    words = launch.arguments(
        job.serving,
        slot,
        release_path=job.release_path,
        release_id=job.release_id,
        host=job.settings.serve_host,
        port=block.first,
        known_flags=flags.known(job.settings.serving_flags),
    )
    return [*launch.command(job.settings), *words]


def url(job: Job, block: ports.Block) -> str:
    """Where the server of this block answers."""
    host = job.settings.serve_host
    return f"http://[{host}]:{block.first}" if ":" in host else f"http://{host}:{block.first}"


class Server:
    """A started server; whoever has started it calls `end`, whatever happened to it."""

    def __init__(self, worker_id: str, job: Job, slot: Slot, block: ports.Block, cache: Path) -> None:
        """Start it.

        Args:
            cache: where its compiled kernels are kept.

        Raises:
            OSError: there is no such program, or the system has no process left to give.
        """
        self.exited = asyncio.Event()
        self.slot = slot
        self.memory_bytes = 0
        """Used on its devices when it became ready; 0 where there is none."""
        self.shared_memory: set[str] = set()
        self._engines: tuple[Process, ...] = ()
        self._job = job
        self._worker_id = worker_id
        self._log = job.log(worker_id)
        self._scratch = scratch.make(job.run_id, worker_id)
        self._began, self._began_at = time.time(), now_s()
        self._killed_before = _killed_for_memory()
        log_files.begin_anew(self._log, job.settings.log_keep)
        environment = launch.environment(
            f"{job.run_id}/{worker_id}",
            slot,
            key=job.key,
            first_internal_port=block.first + 1,
            cache=cache,
            temporary=self._scratch,
            extra=job.settings.worker_environment,
        )
        self._child: subprocess.Popen[bytes] = processes.spawn(
            command(job, slot, block), environment, self._log, cwd=Path("/")
        )
        self.leader: Process | None = processes.identify(self._child.pid)
        """None when it ended before it could be looked at."""
        try:
            # Nobody else reaps the child, so its pid is still its own.
            self._pidfd = os.pidfd_open(self._child.pid)
        except OSError:  # no file is left to open; nobody would know of the server
            self._child.kill()
            self._child.wait()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_exit)

    def why_it_exited(self) -> Diagnosis:
        """From its exit status and its log."""
        killed = _killed_for_memory() - self._killed_before
        return diagnosis.of_exit(self._worker_id, self._log, self._child.wait(), killed)

    def why(self, how: str) -> Diagnosis:
        """From its log, for a server that lives and fails; `how` as in `diagnosis.of_log`."""
        return diagnosis.of_log(self._worker_id, self._log, how)

    def timeline(self) -> dict[str, float]:
        """Event of its start to seconds after it was spawned, as far as its log tells."""
        return timeline.of_log(log_files.tail(self._log, _START_LINES), self._began)

    def age_s(self) -> float:
        """Seconds since it was spawned."""
        return round(now_s() - self._began_at, 1)

    def stuck(self, evidence: str) -> Diagnosis:
        """For a server that serves no more; its log has been quiet about that, so it is not asked."""
        message = f"{self._worker_id} was replaced: {evidence}; its log is {self._log}"
        return Diagnosis("stuck", Remedy.RETRY, message)

    def note_what_it_holds(self) -> None:
        """Its engine's processes and its shared memory, once they are all there: may take some 10 ms."""
        found = self._search()
        self._engines = tuple(one for one in found if _title(one).startswith(_ENGINE_TITLE))
        self.shared_memory |= shared_memory.held_by(found)

    def engines_gone(self) -> tuple[list[str], list[str]]:
        """Of the engine's processes: those that have ended, and those that are stopped."""
        ended = [f"pid {one.pid}" for one in self._engines if not one.is_alive()]
        stopped = [f"pid {one.pid}" for one in self._engines if one.is_stopped()]
        return ended, stopped

    def is_stopped(self) -> bool:
        """Whether its API server is held by a signal: asking it would only cost time."""
        return self.leader is not None and self.leader.is_stopped()

    async def end(self, grace_s: float) -> list[Process]:
        """End it, then all that it forked; returns what does not end, which is normally nothing."""
        self.shared_memory |= await asyncio.to_thread(lambda: shared_memory.held_by(self._search()))
        if self.leader is not None:
            await asyncio.to_thread(processes.end, [self.leader], grace_s)
        survivors = await asyncio.to_thread(processes.end_all, self._search, 0.0)
        if not survivors:
            await asyncio.to_thread(shared_memory.remove, self.shared_memory)
            scratch.remove(self._scratch)
            self._child.wait()
            self._close()
        return survivors

    def _search(self) -> list[Process]:
        return leftovers.worker(self._job.run_id, self._worker_id, self.leader)

    def _note_exit(self) -> None:
        self.exited.set()
        self._close()

    def _close(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _title(process: Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


def _killed_for_memory() -> int:
    """How many processes the kernel has killed for want of memory since it booted; 0 where it does not count them."""
    try:
        counters = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)
