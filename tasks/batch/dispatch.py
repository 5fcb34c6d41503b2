"""Keep the engines full until the rows are used up. Knows nothing of Spark.

As many runners as rows may be in flight each take a row, ask until it is finished, and take the next: no
barrier between chunks of rows or at their ends, and the next chunk is read while the current one is out. The
turns of a session are one runner's, one after the other.

A row is finished by an answer or by its own fault. Trouble with a worker sends it to another one. A row that
was in an engine when it went away, twice, or that engines failed on again and again, is set aside, and asked
alone: only what fails alone, at engines that answer others, is failed; otherwise it stays not started.
"""

import asyncio
import json
import random
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

from tasks.batch.chats import joined, with_answer
from tasks.batch.engine import Answered, Engine, Fault, Refused, Trouble, Unfit
from tasks.batch.pace import Pace
from tasks.batch.records import Result, Row
from tasks.batch.routing import Pool, Worker
from tasks.batch.source import Source
from tasks.errors import StageFailed, Unavailable

_DEATHS_IN_COMPANY = 2
"""Engines that went away or fell silent with a row in them, before it is set aside."""

_ERRORS_IN_COMPANY = 5

_STRIKES_ALONE = 2

_DRAWS = 3
"""Answers that the schema refuses, before the row is failed."""

_FAILED_ALONE = {
    Fault.LOST: "KillsEngine",
    Fault.SILENT: "NoAnswerInTime",
    Fault.ERROR: "EngineError",
}

_REFUSALS_OF_ALL = 20
"""Rows refused before the first answer, at which the fault is not theirs."""

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0

_TICK_S = 0.5
"""How often the number of runners is brought in line with the pool, and the order to stop is looked for."""

_PREFIXES = 4096
"""Beginnings of which it is known which worker has them."""

_CANARY = Row("canary", '[{"role":"user","content":"Say yes."}]', prompt_tokens=4, max_tokens=4)
_CANARY_TRIES = 5


@dataclass
class Tally:
    """What became of the rows that a dispatcher took."""

    answered: int = 0
    failed: int = 0
    given_up: int = 0
    """Not started: the run stopped, or the engines failed on them again and again."""
    set_aside: int = 0
    """To be asked alone."""


class _Ended(Enum):
    """How asking a row ended without an answer."""

    FAILED = "failed"
    LEFT = "left"


@dataclass
class _Asked:
    """A row and what it has been through."""

    row: Row
    messages: str
    """What is sent: its own, after the turns before it."""
    requests: int = 0
    deaths: int = 0
    errors: int = 0
    unfit: int = 0
    strikes: list[Trouble] = field(default_factory=list)
    """Trouble when asked alone."""


class Dispatcher:
    """Asks one stream of rows."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        sink: Callable[[Result], None],
        *,
        release_id: str,
        patience_s: float,
        pace: Pace,
        proven: bool,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            sink: gets each finished row, in the order in which they finish.
            patience_s: how long there may be trouble and no answer before `Unavailable` is raised.
            proven: whether these engines are known to answer this batch; if not, refusals count from the
                first answer on, because a worker that is set up wrongly refuses every row.
            should_stop: whether to start no more rows; those in flight are finished.
        """
        self._engine = engine
        self._pool = pool
        self._sink = sink
        self._release_id = release_id
        self._patience_s = patience_s
        self._pace = pace
        self._should_stop = should_stop
        self._proven = proven
        self._held: list[Result] = []
        """Failed rows, as long as no row is answered."""
        self._stopped = False
        self._alone = False
        self._runners = 0
        self._set_aside: deque[list[Row]] = deque()
        self._workers_of_prefixes: OrderedDict[int, str] = OrderedDict()
        self._last_answer = time.monotonic()
        self._troubles = 0
        """Since the last answer."""
        self.tally = Tally()

    async def run(self, chunks: Iterator[list[Row]], *, lane: bool) -> Tally:
        """Ask all rows of `chunks`, which is read in a thread of its own.

        Args:
            lane: whether rows that are set aside are asked alone at the end; else they are only counted.

        Raises:
            Unavailable: the engines are gone, or bring nothing but trouble; finished rows are in the sink.
            StageFailed: the registry refuses the key, or the engines refuse every row.
        """
        async with _kept_up_to_date(self._pool) as registry:
            await self._ask_in_company(Source(chunks), registry)
            if lane:
                await self._ask_alone()
            self._believe_refusals()
        self.tally.set_aside = sum(row.finished is None for unit in self._set_aside for row in unit)
        return self.tally

    async def run_alone(self, chunks: Iterator[list[Row]]) -> Tally:
        """Ask all rows of `chunks` one at a time, as rows that were set aside. Nobody else must be asking."""
        source = Source(chunks)
        async with _kept_up_to_date(self._pool):
            while (unit := await source.next()) is not None:
                self._set_aside.append(unit)
            await self._ask_alone()
            self._believe_refusals()
        return self.tally

    async def _ask_in_company(self, source: Source, registry: asyncio.Task[None]) -> None:
        running: set[asyncio.Task[None]] = {registry}
        try:
            while not (source.is_empty or self._stopped) or len(running) > 1:
                self._stopped = self._stopped or self._should_stop()
                while self._runners < self._pool.limit and not (source.is_empty or self._stopped):
                    self._runners += 1
                    running.add(asyncio.create_task(self._runner(source)))
                done, running = await asyncio.wait(
                    running, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
                errors = [task.exception() for task in done]
                for error in errors:
                    if error is not None:
                        raise error
        finally:
            for task in running - {registry}:
                task.cancel()
            await asyncio.gather(*(running - {registry}), return_exceptions=True)

    async def _runner(self, source: Source) -> None:
        try:
            while not self._stopped and self._runners <= self._pool.limit:
                unit = await source.next()
                if unit is None:
                    return
                await self._converse(unit)
        finally:
            self._runners -= 1

    async def _converse(self, unit: list[Row]) -> None:
        """Ask a row, or the turns of a session in their order, each with those before it and their answers."""
        history = ""
        preferred = self._workers_of_prefixes.get(unit[0].prefix) if unit[0].prefix is not None else None
        for number, row in enumerate(unit):
            asked = _Asked(row, joined(history, row.messages) if row.session is not None else row.messages)
            if row.finished is not None:
                answer = json.loads(row.finished)
            elif self._stopped and number:
                self.tally.given_up += len(unit) - number
                return
            else:
                ended, preferred = await (self._finish_alone if self._alone else self._finish)(
                    asked, preferred
                )
                if ended is _Ended.LEFT:
                    self._leave(unit, number)
                    return
                answer = ended if isinstance(ended, str) else None
            if answer is None:
                self._fail_later_turns(unit[number + 1 :], row)
                return
            if row.session is not None:
                history = with_answer(asked.messages, answer)
                unit[number] = replace(row, finished=json.dumps(answer))
        if unit[0].prefix is not None and preferred is not None:
            self._remember(unit[0].prefix, preferred)

    def _leave(self, unit: list[Row], number: int) -> None:
        """The rest of a unit cannot go on now."""
        if self._stopped or self._alone:
            self.tally.given_up += sum(row.finished is None for row in unit[number:])
        else:
            self._set_aside.append(unit)

    def _fail_later_turns(self, rows: list[Row], earlier: Row) -> None:
        for row in rows:
            if row.finished is None:
                message = f"turn {earlier.id} of its session has no answer, so this one cannot be asked"
                self._fail(_Asked(row, ""), "EarlierTurnFailed", message, None, 0.0)

    async def _finish(self, asked: _Asked, preferred: str | None) -> tuple[str | _Ended, str | None]:
        """Ask until the row is finished or set aside; returns its answer, and which worker gave it."""
        while True:
            worker = await self._pool.choose(preferred)
            outcome, latency_s = await self._ask(worker, asked)
            if not isinstance(outcome, Trouble):
                ended = self._take(asked, outcome, worker, latency_s)
                if ended is not None:
                    return ended, worker.name
                continue
            asked.deaths += outcome.fault in (Fault.LOST, Fault.SILENT)
            asked.errors += outcome.fault is Fault.ERROR
            is_suspect = asked.deaths >= _DEATHS_IN_COMPANY or asked.errors >= _ERRORS_IN_COMPANY
            if is_suspect or self._stopped:
                return _Ended.LEFT, None
            # A worker that was not reached rests; another one may be asked at once.
            if outcome.fault is not Fault.UNREACHED:
                await asyncio.sleep(_backoff_s(asked.requests))

    async def _ask_alone(self) -> None:
        """The last lane: rows that were met by trouble, one at a time, with none of ours in flight."""
        self._alone = True
        while self._set_aside and not self._stopped:
            await self._converse(self._set_aside.popleft())
            self._stopped = self._should_stop()
        self.tally.given_up += sum(row.finished is None for unit in self._set_aside for row in unit)
        self._set_aside.clear()

    async def _finish_alone(self, asked: _Asked, preferred: str | None) -> tuple[str | _Ended, str | None]:
        while len(asked.strikes) < _STRIKES_ALONE:
            worker = await self._pool.choose(preferred)
            outcome, latency_s = await self._ask(worker, asked)
            if not isinstance(outcome, Trouble):
                ended = self._take(asked, outcome, worker, latency_s)
                if ended is not None:
                    return ended, worker.name
                continue
            if outcome.fault in _FAILED_ALONE:
                asked.strikes.append(outcome)
                # What a row does alone is not its slot's fault: one that was given up because of it is tried again.
                await self._pool.retry_slots()
            await asyncio.sleep(_backoff_s(len(asked.strikes)))
        last = asked.strikes[-1]
        if not await self._engines_answer_others():
            return _Ended.LEFT, None
        message = f"asked alone {len(asked.strikes)} times, while the engines answer others: {last.message}"
        self._fail(asked, _FAILED_ALONE[last.fault], message, None, 0.0)
        return _Ended.FAILED, None

    async def _engines_answer_others(self) -> bool:
        """Whether a worker answers a chat that no engine minds."""
        for number in range(_CANARY_TRIES):
            worker = await self._pool.choose()
            outcome, _ = await self._ask(worker, _Asked(_CANARY, _CANARY.messages))
            if isinstance(outcome, Answered | Unfit):
                worker.answered()
                return True
            await asyncio.sleep(_backoff_s(number + 2))
        return False

    async def _ask(self, worker: Worker, asked: _Asked) -> tuple[Answered | Refused | Unfit | Trouble, float]:
        """One request.

        Raises:
            Unavailable: there was nothing but trouble for too long.
        """
        worker.in_flight += 1
        asked.requests += 1
        began = time.monotonic()
        try:
            timeout_s = self._pace.timeout_s(asked.row.max_tokens)
            outcome = await self._engine.ask(worker.url, asked.row, asked.messages, timeout_s)
        finally:
            worker.in_flight -= 1
            self._pool.has_room()
        if isinstance(outcome, Trouble):
            self._note(outcome)
            if outcome.fault is Fault.BUSY:
                worker.is_full(outcome.retry_after_s)
            else:
                worker.failed(outcome.retry_after_s, may_be_the_rows=outcome.fault is Fault.ERROR)
        return outcome, time.monotonic() - began

    def _note(self, trouble: Trouble) -> None:
        self._troubles += 1
        silent_s = time.monotonic() - self._last_answer
        if silent_s > self._patience_s and self._troubles > self._pool.limit:
            raise Unavailable(
                f"no worker has answered for {silent_s:.0f} s; the last one said: {trouble.message}. What is "
                f"answered is kept; look at the workers' logs, then run the stages start and run again"
            )

    def _take(
        self, asked: _Asked, outcome: Answered | Refused | Unfit, worker: Worker, latency_s: float
    ) -> str | _Ended | None:
        """What a worker said; None when the row is to be asked again."""
        worker.answered()
        self._last_answer = time.monotonic()
        self._troubles = 0
        if isinstance(outcome, Answered):
            self._pace.learn(latency_s, outcome.completion_tokens)
            self._answer(asked, outcome, worker.name, latency_s)
            return outcome.text
        if isinstance(outcome, Unfit):
            self._pace.learn(latency_s, outcome.answered.completion_tokens)
            asked.unfit += 1
            if asked.unfit < _DRAWS and not self._stopped:
                return None
        self._fail(asked, outcome.error_class, outcome.message, worker.name, latency_s)
        return _Ended.FAILED

    def _answer(self, asked: _Asked, answered: Answered, worker: str, latency_s: float) -> None:
        self.tally.answered += 1
        if not self._proven:
            self._believe_refusals()
        cut_off = answered.finish_reason == "length"
        self._sink(
            Result(
                id=asked.row.id,
                status="length" if cut_off else "answered" if answered.text else "empty",
                answer=answered.text,
                error_class=None,
                error_message=None,
                finish_reason=answered.finish_reason,
                prompt_tokens=answered.prompt_tokens,
                completion_tokens=answered.completion_tokens,
                latency_s=round(latency_s, 4),
                worker=worker,
                attempts=asked.requests,
                release_id=self._release_id,
            )
        )

    def _fail(
        self, asked: _Asked, error_class: str, message: str, worker: str | None, latency_s: float
    ) -> None:
        result = Result(
            id=asked.row.id,
            status="failed",
            answer=None,
            error_class=error_class,
            error_message=message,
            finish_reason=None,
            prompt_tokens=asked.row.prompt_tokens,
            completion_tokens=0,
            latency_s=round(latency_s, 4),
            worker=worker,
            attempts=asked.requests,
            release_id=self._release_id,
        )
        self.tally.failed += 1
        if self._proven:
            self._sink(result)
            return
        self._held.append(result)
        if len(self._held) >= _REFUSALS_OF_ALL:
            raise StageFailed(
                f"the first {len(self._held)} rows were refused and none was answered; the last one because: "
                f"{message}. No row is recorded as failed: see whether the workers serve what the batch asks "
                f"for"
            )

    def _believe_refusals(self) -> None:
        self._proven = True
        for result in self._held:
            self._sink(result)
        self._held.clear()

    def _remember(self, prefix: int, worker: str) -> None:
        self._workers_of_prefixes[prefix] = worker
        self._workers_of_prefixes.move_to_end(prefix)
        if len(self._workers_of_prefixes) > _PREFIXES:
            self._workers_of_prefixes.popitem(last=False)


@asynccontextmanager
async def _kept_up_to_date(pool: Pool) -> AsyncIterator[asyncio.Task[None]]:
    """For the length of a block, what is known about the pool follows its registry."""
    await pool.refresh()
    task = asyncio.create_task(pool.keep_up_to_date())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _backoff_s(attempt: int) -> float:
    """Full jitter, so that rows that failed together do not come back together."""
    return random.uniform(0.0, min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S))
