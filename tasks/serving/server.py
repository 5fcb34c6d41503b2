"""One vLLM server as a process: spawned, its exit noticed at once, ended with all that it forked.

Everything here but the waiting runs in the keeper's main thread, because the kernel ends a tied child with
the *thread* that started it.
"""

import asyncio
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tasks.node import processes
from tasks.node.processes import Process
from tasks.serving import diagnosis, launch, leftovers, ports
from tasks.serving.diagnosis import Diagnosis
from tasks.serving.launch import Slot
from tasks.settings import Settings
from tasks.spec import Serving


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

    def log(self, worker_id: str) -> Path:
        """Where a worker's output goes, of all its attempts."""
        return self.settings.logs / self.run_id / f"{worker_id}.log"


def command(job: Job, slot: Slot, block: ports.Block) -> list[str]:
    """The whole command line; it holds no secret."""
    flags = launch.arguments(
        job.serving,
        slot,
        release_path=job.release_path,
        release_id=job.release_id,
        host=job.settings.serve_host,
        port=block.first,
    )
    return [*launch.command(job.settings), *flags]


def url(job: Job, block: ports.Block) -> str:
    """Where the server of this block answers."""
    host = job.settings.serve_host
    return f"http://[{host}]:{block.first}" if ":" in host else f"http://{host}:{block.first}"


class Server:
    """A started server; whoever has started it calls `end`, whatever happened to it."""

    def __init__(self, worker_id: str, job: Job, slot: Slot, block: ports.Block) -> None:
        """Start it.

        Raises:
            OSError: there is no such program, or the system has no process left to give.
        """
        self.exited = asyncio.Event()
        self._job = job
        self._worker_id = worker_id
        self._log = job.log(worker_id)
        self._log_offset = self._log.stat().st_size if self._log.exists() else 0
        environment = launch.environment(
            f"{job.run_id}/{worker_id}",
            slot,
            key=job.key,
            first_internal_port=block.first + 1,
            cache=launch.cache_folder(job.settings),
            extra=job.settings.worker_environment,
        )
        self._child: subprocess.Popen[bytes] = processes.spawn(
            command(job, slot, block), environment, self._log, cwd=Path("/")
        )
        self.leader: Process | None = processes.identify(self._child.pid)
        """None when it ended before it could be looked at."""
        # Nobody else reaps the child, so its pid is still its own.
        self._pidfd = os.pidfd_open(self._child.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_exit)

    def why_it_exited(self) -> Diagnosis:
        """From its exit status and its log."""
        return diagnosis.of_exit(self._worker_id, self._log, self._log_offset, self._child.wait())

    def why(self, how: str) -> Diagnosis:
        """From its log, for a server that lives and fails; `how` as in `diagnosis.of_log`."""
        return diagnosis.of_log(self._worker_id, self._log, self._log_offset, how)

    async def end(self, grace_s: float) -> list[Process]:
        """End it, then all that it forked; returns what does not end, which is normally nothing."""
        leader = self.leader
        if leader is not None:
            await asyncio.to_thread(processes.end, [leader], grace_s)

        def search() -> list[Process]:
            return leftovers.worker(self._job.run_id, self._worker_id, leader)

        survivors = await asyncio.to_thread(processes.end_all, search, 0.0)
        if not survivors:
            self._child.wait()
            self._close()
        return survivors

    def _note_exit(self) -> None:
        self.exited.set()
        self._close()

    def _close(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
