"""One worker: a vLLM server in its slot, started, watched, replaced when it dies, and ended.

Keeps: what is about to be started is in the ledger before it exists; when a server's end was seen, all that it
forked is ended too, before the slot is used again; a slot is tried a bounded number of times, each later than
the one before.

Everything here runs in the keeper's main thread, because the kernel ends a tied child with the *thread* that
started it. Only what waits for processes to end runs elsewhere.
"""

import asyncio
import logging
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp
from psycopg.types.json import Jsonb

from tasks.errors import Remedy, StageError
from tasks.ledger.connection import Connection
from tasks.node import processes
from tasks.node.processes import Process
from tasks.serving import diagnosis, launch, leftovers, ports, probes
from tasks.serving.diagnosis import Diagnosis
from tasks.serving.launch import Slot
from tasks.serving.line import now_s
from tasks.settings import Settings
from tasks.spec import Serving

log = logging.getLogger(__name__)

State = Literal["starting", "warming", "ready", "suspect", "dead", "stopping", "stopped"]

_START_POLL_S = 0.25
_PREWARM_REQUESTS = 2
_PREWARM_TOKENS = 4
_RECORD_WAIT_S = 5.0
"""An intent should be in the ledger before the process is; but with the database gone a pool must still heal."""
_LONGEST_PAUSE_S = 60.0


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


class Record(Protocol):
    """Puts a write to the ledger in line."""

    def __call__(self, write: Callable[[Connection], None]) -> "asyncio.Future[None]": ...


class _Ended(Exception):
    """The server ended, or is as good as ended."""

    def __init__(self, why: Diagnosis) -> None:
        super().__init__(why.message)
        self.why = why


@dataclass
class _Server:
    """A started server."""

    child: "subprocess.Popen[bytes]"
    leader: Process | None
    """None when it ended before it could be looked at."""
    exited: asyncio.Event
    log_offset: int


class Worker:
    """Tends one slot. `tend` is its life; the rest can be read at any time."""

    def __init__(
        self,
        number: int,
        slot: Slot,
        job: Job,
        client: aiohttp.ClientSession,
        record: Record,
        queries: Any,
        turns: asyncio.Semaphore,
    ) -> None:
        """
        Args:
            turns: how many servers may be starting at once; memory decides.
        """
        self.worker_id = f"worker-{number}"
        self.state: State = "stopped"
        self.message = "not started yet"
        self.attempt = 0
        self.url = ""
        self.load = probes.Load(0, 0)
        self.given_up: Diagnosis | None = None
        self._slot = slot
        self._job = job
        self._settings = job.settings
        self._client = client
        self._record = record
        self._queries = queries
        self._turns = turns
        self._log = job.settings.logs / job.run_id / f"{self.worker_id}.log"
        self._part = f"{job.run_id}/{self.worker_id}"
        self._spoilt_blocks: set[int] = set()
        self._server: _Server | None = None
        self._try_again = asyncio.Event()
        self._ready_since: float | None = None

    def describe(self) -> dict[str, Any]:
        """For the registry."""
        gave_up = self.given_up
        return {
            "worker_id": self.worker_id,
            "url": self.url,
            "state": self.state,
            "max_num_seqs": self._job.serving.max_num_seqs,
            **asdict(self.load),
            "attempt": self.attempt,
            "message": self.message,
            "given_up": {"kind": gave_up.kind, "remedy": gave_up.remedy.value} if gave_up else None,
        }

    def try_again(self) -> None:
        """Try the slot again if it was given up."""
        self._try_again.set()

    async def tend(self) -> None:
        """Keep a server in the slot, until cancelled."""
        while True:
            await self._serve_until_given_up()
            self._try_again.clear()
            await self._try_again.wait()
            self.given_up = None

    async def stop(self) -> None:
        """End the server and all that it forked. `tend` has been cancelled before."""
        if self._server is None:
            return
        # One that is still starting may not obey (seen on vLLM 0.26), and has nothing to lose.
        grace_s = self._settings.stop_grace_s if self._ready_since is not None else 1.0
        self._change("stopping", "the pool ends")
        survivors = await self._end_server(grace_s)
        self._change("stopped", f"{survivors or 'nothing'} is left")

    async def _serve_until_given_up(self) -> None:
        failures = 0
        while True:
            self._ready_since = None
            try:
                await self._serve()
            except _Ended as ended:
                why = ended.why
            except StageError as error:
                why = Diagnosis("not started", error.remedy, str(error))
            except OSError as error:
                why = Diagnosis("not started", Remedy.OPERATOR, f"{self.worker_id} cannot be started: {error}")
            self._change("dead", why.message)
            await self._end_server(grace_s=0)
            if self._ready_since is not None and now_s() - self._ready_since > self._settings.worker_settled_s:
                failures = 0
            failures += 1
            if why.remedy is not Remedy.RETRY or failures >= self._settings.worker_attempts:
                self.given_up = why
                log.error("%s is given up after %d start(s): %s", self.worker_id, failures, why.message)
                return
            await asyncio.sleep(min(0.25 * 4 ** (failures - 1), _LONGEST_PAUSE_S))

    async def _serve(self) -> None:
        """Start a server and watch it; ends only by raising.

        Raises:
            _Ended: the server did, or does not answer any more.
        """
        async with self._started() as server:
            watch = asyncio.ensure_future(self._warm_up_and_watch(server))
            exited = asyncio.ensure_future(server.exited.wait())
            try:
                await asyncio.wait({watch, exited}, return_when=asyncio.FIRST_COMPLETED)
                if exited.done():
                    status = server.child.wait()
                    why = diagnosis.of_exit(self.worker_id, self._log, server.log_offset, status)
                    raise _Ended(why)
                await watch
            finally:
                for task in (watch, exited):
                    task.cancel()
                await asyncio.gather(watch, exited, return_exceptions=True)

    async def _warm_up_and_watch(self, server: _Server) -> None:
        try:
            await self._until_healthy(server)
            self._change("warming", "the server answers")
            await self._prewarm(server)
        finally:
            self._leave_turn()
        self._ready_since = now_s()
        self._change("ready", f"{_PREWARM_REQUESTS} chats were answered")
        await self._watch(server)

    async def _until_healthy(self, server: _Server) -> None:
        deadline = now_s() + self._settings.start_timeout_s
        while not await probes.is_healthy(self._client, self.url):
            if now_s() > deadline:
                raise self._failed(server, f"was not ready after {self._settings.start_timeout_s:.0f} s")
            await asyncio.sleep(_START_POLL_S)

    async def _prewarm(self, server: _Server) -> None:
        chat = {"max_tokens": _PREWARM_TOKENS, "timeout_s": self._settings.canary_timeout_s}
        chats = [
            probes.answer(self._client, self.url, self._job.release_id, **chat)  # type: ignore[arg-type]
            for _ in range(_PREWARM_REQUESTS)
        ]
        try:
            await asyncio.gather(*chats)
            await probes.refuses_strangers(self.url, self._settings.canary_timeout_s)
        except probes.NoAnswer as error:
            raise self._failed(server, f"does not serve: {error}") from None

    async def _watch(self, server: _Server) -> None:
        """Look at the server every second until it does not answer any more."""
        answered_at = now_s()
        while True:
            load = await probes.load(self._client, self.url)
            if load is not None and await probes.is_healthy(self._client, self.url):
                self.load = load
                answered_at = now_s()
                if self.state == "suspect":
                    self._change("ready", "the server answers again")
            silent_s = now_s() - answered_at
            if silent_s > self._settings.worker_silence_s:
                raise self._failed(server, f"has not answered for {silent_s:.0f} s")
            if silent_s > self._settings.worker_silence_s / 4 and self.state == "ready":
                self._change("suspect", f"no answer for {silent_s:.0f} s")
            await asyncio.sleep(self._settings.registry_poll_s)

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[_Server]:
        """A server from its intent on; its ports are given back at the end, its processes are not ended here."""
        settings, job = self._settings, self._job
        block = ports.reserve(
            settings.serve_host,
            settings.port_range,
            settings.ports_per_worker,
            frozenset(self._spoilt_blocks),
        )
        await self._turns.acquire()
        self._has_turn = True
        descriptor = -1
        try:
            command = self._command(block)
            self.attempt += 1
            self.url = f"http://{_in_url(settings.serve_host)}:{block.first}"
            self._spoilt_blocks.add(block.first)
            self.state, self.message, self.load = "starting", "about to be started", probes.Load(0, 0)
            await self._intend(command, block)
            server = self._spawn(command, block)
            descriptor = self._signal_exit(server)
            self._record_started(server)
            yield server
            self._spoilt_blocks.clear()
        finally:
            if descriptor >= 0:
                asyncio.get_running_loop().remove_reader(descriptor)
                os.close(descriptor)
            self._leave_turn()
            block.release()

    def _command(self, block: ports.Block) -> list[str]:
        flags = launch.arguments(
            self._job.serving,
            self._slot,
            release_path=self._job.release_path,
            release_id=self._job.release_id,
            host=self._settings.serve_host,
            port=block.first,
        )
        return [*launch.command(self._settings), *flags]

    def _spawn(self, command: list[str], block: ports.Block) -> _Server:
        environment = launch.environment(
            self._part,
            self._slot,
            key=self._job.key,
            first_internal_port=block.first + 1,
            cache=launch.cache_folder(self._settings),
            extra=self._settings.worker_environment,
        )
        offset = self._log.stat().st_size if self._log.exists() else 0
        child = processes.spawn(command, environment, self._log, cwd=Path("/"))
        self._server = _Server(child, processes.identify(child.pid), asyncio.Event(), offset)
        log.info("%s: attempt %d is pid %d on %s", self.worker_id, self.attempt, child.pid, self.url)
        return self._server

    def _signal_exit(self, server: _Server) -> int:
        # Nobody else reaps the child, so its pid cannot mean another process here.
        descriptor = os.pidfd_open(server.child.pid)
        asyncio.get_running_loop().add_reader(descriptor, server.exited.set)
        return descriptor

    async def _end_server(self, grace_s: float) -> list[Process]:
        """End the server, then whatever it left; returns what does not end."""
        server = self._server
        if server is None:
            return []
        leader = server.leader
        if leader is not None:
            await asyncio.to_thread(processes.end, [leader], grace_s)

        def search() -> list[Process]:
            return leftovers.worker(self._job.run_id, self.worker_id, leader)

        survivors = await asyncio.to_thread(processes.end_all, search, 0.0)
        if survivors:
            log.error("%s: %s do not end", self.worker_id, survivors)
        else:
            server.child.wait()
            self._server = None
        return survivors

    def _failed(self, server: _Server, how: str) -> _Ended:
        return _Ended(diagnosis.of_log(self.worker_id, self._log, server.log_offset, how))

    def _leave_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._turns.release()

    _has_turn = False

    async def _intend(self, command: list[str], block: ports.Block) -> None:
        values = {**self._identity(), "command": Jsonb(command), "log": str(self._log)}
        values |= {"first_port": block.first, "end_port": block.end}
        written = self._record(lambda connection: self._queries.intend_worker(connection, **values))
        try:
            await asyncio.wait_for(asyncio.shield(written), _RECORD_WAIT_S)
        except (TimeoutError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not written.cancelled():
                raise
            log.warning("%s is started before the ledger knows of it: it does not answer", self.worker_id)

    def _record_started(self, server: _Server) -> None:
        if server.leader is not None:
            values = {**self._identity(), **asdict(server.leader)}
            self._record(lambda connection: self._queries.worker_started(connection, **values))

    def _change(self, state: State, evidence: str) -> None:
        log.info("%s: %s: %s", self.worker_id, state, evidence)
        self.state, self.message = state, evidence
        if state != "ready":
            self.load = probes.Load(0, 0)
        if self.attempt:
            values = {**self._identity(), "state": state, "evidence": evidence}
            self._record(lambda connection: self._queries.worker_changed(connection, **values))

    def _identity(self) -> dict[str, Any]:
        return {"pool_id": self._job.pool_id, "worker_id": self.worker_id, "attempt": self.attempt}


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
