"""One worker: the slot's server is started, warmed, watched, replaced when it dies, and ended.

Keeps: what is about to be started is in the ledger before it exists; all that a server forked has ended
before the slot is used again; a slot is tried a bounded number of times, each later than the one before.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Literal, Protocol

import aiohttp
from psycopg.types.json import Jsonb

from tasks.errors import Remedy, StageError
from tasks.ledger.connection import Connection
from tasks.node.processes import Process
from tasks.serving import diagnosis, ports, prewarm, probes, reading, server, watching
from tasks.serving.diagnosis import Diagnosis
from tasks.serving.failing import Failed, unless_it_exits
from tasks.serving.launch import Slot
from tasks.serving.line import now_s
from tasks.serving.server import Job, Server
from tasks.serving.slot_state import SlotState

log = logging.getLogger(__name__)

State = Literal["starting", "warming", "ready", "suspect", "dead", "stopping", "stopped"]

_START_POLL_S = 0.25
_FIRST_CHAT_TOKENS = 4
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 60.0

_RECORD_WAIT_S = 5.0
"""An intent should be in the ledger before the process; but with the database gone a pool must still heal."""

_GRACE_WITHOUT_SERVICE_S = 1.0
"""A server that is still starting may not obey SIGTERM (seen on vLLM 0.26); nor may one that waits for an engine
that hangs."""


class Record(Protocol):
    """Puts a write to the ledger in line."""

    def __call__(self, write: Callable[[Connection], None]) -> "asyncio.Future[None]": ...


class Worker:
    """Tends one slot. `tend` is its life; its attributes can be read at any time."""

    def __init__(
        self,
        number: int,
        slot: Slot,
        job: Job,
        *,
        client: aiohttp.ClientSession,
        record: Record,
        queries: Any,
        turns: asyncio.Semaphore,
    ) -> None:
        """
        Args:
            turns: how many servers of the pool may be starting at once.
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
        self._server: Server | None = None
        self._ready_since: float | None = None
        self._slot_state = SlotState(slot, job)
        self._unwanted_blocks: set[int] = set()
        self._wanted_again = asyncio.Event()

    def describe(self) -> dict[str, Any]:
        """For the registry."""
        gave_up = self.given_up
        return {
            "worker_id": self.worker_id,
            "url": self.url,
            "state": self.state,
            "max_num_seqs": self._job.serving.sequences,
            **asdict(self.load),
            "attempt": self.attempt,
            "message": self.message,
            "given_up": {"kind": gave_up.kind, "remedy": gave_up.remedy.value} if gave_up else None,
        }

    @property
    def is_gone(self) -> bool:
        """Whether no process of it is left."""
        return self._server is None

    def try_again(self) -> None:
        """Try the slot again if it was given up."""
        if self.given_up is not None:
            self.given_up = None
            self._wanted_again.set()

    @property
    def served(self) -> bool:
        """Whether its latest start came to be ready, whatever became of it since."""
        return self._ready_since is not None

    async def tend(self) -> None:
        """Keep a server in the slot, until cancelled; then `stop` ends it."""
        while True:
            await self._serve_until_it_makes_no_sense()
            await self._wanted_again.wait()
            self._wanted_again.clear()

    async def stop(self) -> None:
        """End the server and all that it forked."""
        if self._server is None:
            return
        # One that serves ends cleanly when it is asked; one that starts or hangs may not, and has nothing to lose.
        grace_s = self._settings.stop_grace_s if self.state == "ready" else _GRACE_WITHOUT_SERVICE_S
        self._change("stopping", "the pool ends")
        survivors = await self._server.end(grace_s)
        if survivors:
            self._change("suspect", self._do_not_end(survivors))
        else:
            self._server = None
            self._change("stopped", "nothing of it is left")

    async def _serve_until_it_makes_no_sense(self) -> None:
        failures = 0
        while True:
            why = await self._end_the_last_one() or await self._serve()
            self._change("dead", why.message)
            why = await self._end_the_last_one() or why
            if await self._slot_state.dropped_its_cache(why, self._ready_since is not None):
                why = replace(why, remedy=Remedy.RETRY)
            if (
                self._ready_since is not None
                and now_s() - self._ready_since > self._settings.worker_settled_s
            ):
                failures = 0
            failures += 1
            if why.remedy is not Remedy.RETRY or failures >= self._settings.worker_attempts:
                log.error("%s is given up after start %d in a row", self.worker_id, failures)
                self.given_up = why
                return
            await asyncio.sleep(min(_FIRST_PAUSE_S * 4 ** (failures - 1), _LONGEST_PAUSE_S))
            await self._slot_state.until_memory_is_back()

    async def _end_the_last_one(self) -> Diagnosis | None:
        """End the slot's server and all that it forked; returns what is wrong when that cannot be done."""
        if self._server is None:
            return None
        survivors = await self._server.end(grace_s=0)
        if survivors:
            return Diagnosis("does not end", Remedy.OPERATOR, self._do_not_end(survivors))
        self._server = None
        return None

    def _do_not_end(self, survivors: list[Process]) -> str:
        pids = ", ".join(str(process.pid) for process in survivors)
        return (
            f"process(es) {pids} of {self.worker_id} do not end, not even after SIGKILL: they hang in the kernel (a "
            f"driver or a file system); look at /proc/PID/stack"
        )

    async def _serve(self) -> Diagnosis:
        """Start a server and watch it; returns why it does not serve any more."""
        self._ready_since = None
        try:
            block = ports.reserve(
                self._settings.serve_host,
                self._settings.port_range,
                self._settings.ports_per_worker,
                frozenset(self._unwanted_blocks),
            )
        except StageError as error:
            return Diagnosis("no ports", error.remedy, str(error))
        try:
            async with self._turns:
                started = await self._start(block)
                failed = await unless_it_exits(started.exited, self._warm_up(started))
            if failed is None and not started.exited.is_set():
                failed = await unless_it_exits(started.exited, self._watch(started))
            why = failed.why if failed else started.why_it_exited()
        except OSError as error:
            return diagnosis.not_started(self.worker_id, error)
        finally:
            block.release()
        if self._ready_since is not None and why.remedy is not Remedy.RETRY:
            # It served: flags, files and sizes were right. What its log says of them is an echo of its end.
            why = replace(why, remedy=Remedy.RETRY)
        if why.kind == "address in use":
            self._unwanted_blocks.add(block.first)
        return why

    async def _start(self, block: ports.Block) -> Server:
        self.attempt += 1
        self.url = server.url(self._job, block)
        self.state, self.message = "starting", "about to be started"
        await self._intend(block)
        self._slot_state.begin()
        self._server = started = Server(self.worker_id, self._job, self._slot, block, self._slot_state.cache)
        log.info("%s: start %d: %s on %s", self.worker_id, self.attempt, started.leader, self.url)
        if started.leader is not None:
            values = {**self._identity(), **asdict(started.leader)}
            self._record(lambda connection: self._queries.worker_started(connection, **values))
        self._change("starting", f"started on {self.url}")
        return started

    async def _warm_up(self, started: Server) -> None:
        """Wait until the server answers, and send it its first chats, which are slower than later ones."""
        timeout_s = self._settings.start_timeout_s
        deadline = now_s() + timeout_s
        while not await probes.is_healthy(self._client, self.url):
            if now_s() > deadline:
                why = started.why(f"was not ready after {timeout_s:.0f} s")
                # It was given all the time there is; another start would only take as long again.
                raise Failed(replace(why, remedy=Remedy.OPERATOR) if why.kind == "unknown" else why)
            await asyncio.sleep(_START_POLL_S)
        self._change("warming", "the server answers")
        try:
            await probes.answer(
                self._client,
                self.url,
                self._job.release_id,
                max_tokens=_FIRST_CHAT_TOKENS,
                timeout_s=self._settings.canary_timeout_s,
            )
            whose = (self._client, self.url, self._job.release_id, self._job.release_path)
            read = await reading.prove(*whose, self._settings)
            rounds = prewarm.most_rounds(self._slot, self._settings)
            warmed = await prewarm.warm(*whose, self._job.shapes, self._settings, rounds)
            report = {"reading": read, **warmed}
        except reading.Misread as error:  # which another start would not change
            raise Failed(Diagnosis("misread", Remedy.OPERATOR, f"{self.worker_id} {error}")) from None
        except probes.NoAnswer as error:
            raise Failed(started.why(f"does not serve: {error}")) from None
        await asyncio.to_thread(started.note_what_it_holds)
        started.memory_bytes = await asyncio.to_thread(self._slot_state.memory_bytes)
        self._record_start(report, started)
        self._ready_since = now_s()
        self._change("ready", prewarm.summary(report))

    async def _watch(self, started: Server) -> None:
        """Follow the verdicts on the server until it is dead."""
        async for verdict, look in watching.verdicts(self._client, self.url, self._job, started):
            if verdict.state == "dead":
                raise Failed(started.stuck(verdict.evidence))
            if verdict.state != self.state:
                self._change(verdict.state, verdict.evidence)
            if look is not None:
                self.load = look.load

    async def _intend(self, block: ports.Block) -> None:
        values = {
            **self._identity(),
            "command": Jsonb(server.command(self._job, self._slot, block)),
            "log": str(self._job.log(self.worker_id)),
            "first_port": block.first,
            "end_port": block.end,
        }
        written = self._record(lambda connection: self._queries.intend_worker(connection, **values))
        await asyncio.wait({written}, timeout=_RECORD_WAIT_S)
        if not written.done():
            log.warning("%s is started before the ledger knows of it: it does not answer", self.worker_id)

    def _record_start(self, first_requests: dict[str, Any], started: Server) -> None:
        startup = {
            "timeline": {**started.timeline(), "ready": started.age_s()},
            "first_requests": first_requests,
            "compile_cache": {
                "folder": str(self._slot_state.cache),
                "was_warm": self._slot_state.cache_was_warm,
            },
            "device_memory_bytes": started.memory_bytes,
        }
        values = {
            **self._identity(),
            "startup": Jsonb(startup),
            "shared_memory": sorted(started.shared_memory),
        }
        self._record(lambda connection: self._queries.worker_warmed(connection, **values))

    def _change(self, state: State, evidence: str) -> None:
        log.info("%s: %s: %s", self.worker_id, state, evidence)
        self.state, self.message = state, evidence
        self.load = probes.Load(0, 0)
        if self.attempt:
            values = {**self._identity(), "state": state, "evidence": evidence}
            self._record(lambda connection: self._queries.worker_changed(connection, **values))

    def _identity(self) -> dict[str, Any]:
        return {"pool_id": self._job.pool_id, "worker_id": self.worker_id, "attempt": self.attempt}
