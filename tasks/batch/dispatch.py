"""Keep the engines full until the rows are used up. Knows nothing of Spark.

As many runners as rows may be in flight each take a row, ask until it is finished, and take the next: no
barrier between chunks of rows or at their ends, and the next chunk is read while the current one is out.

A row is finished by an answer or by its own fault. Trouble with a worker sends it to another one. A row
that is met by trouble again and again is set aside, and asked alone at the end: only what fails alone, at
an engine that answers others, is failed; otherwise it stays not started.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tasks.batch.engine import Answered, Engine, Fault, Refused, Trouble
from tasks.batch.records import Result, Row
from tasks.batch.routing import Pool
from tasks.errors import StageFailed, Unavailable

_ATTEMPTS_IN_COMPANY = 5
"""Requests that brought trouble and reached an engine, before a row is set aside."""

_ATTEMPTS_ALONE = 2

_REFUSALS_OF_ALL = 20
"""Rows refused before the first answer, at which the fault is not theirs."""

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0

_TICK_S = 0.5
"""How often the number of runners is brought in line with the pool, and the order to stop is looked for."""


@dataclass
class Tally:
    """What became of the rows that a dispatcher took."""

    answered: int = 0
    failed: int = 0
    given_up: int = 0
    """Not started, because the engines failed on them again and again."""


@dataclass
class _Asked:
    """A row and what it has been through."""

    row: Row
    requests: int = 0
    suspicions: int = 0
    """Requests that an engine took and did not answer."""


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
        self._should_stop = should_stop
        self._proven = proven
        self._held: list[Result] = []
        """Failed rows, as long as no row is answered."""
        self._stopped = False
        self._runners = 0
        self._set_aside: deque[_Asked] = deque()
        self._last_answer = time.monotonic()
        self._troubles = 0
        """Since the last answer."""
        self.tally = Tally()

    async def run(self, chunks: Iterator[list[Row]]) -> Tally:
        """Ask all rows of `chunks`, which is read in a thread of its own.

        Raises:
            Unavailable: the engines are gone, or bring nothing but trouble; finished rows are in the sink.
            StageFailed: the registry refuses the key, or the engines refuse every row.
        """
        await self._pool.refresh()
        source = _Source(chunks)
        registry = asyncio.create_task(self._pool.keep_up_to_date())
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
                for task in done:
                    task.result()
            await self._ask_alone()
            self._believe_refusals()
        finally:
            for task in running | {registry}:
                task.cancel()
            await asyncio.gather(*running, registry, return_exceptions=True)
        return self.tally

    async def _runner(self, source: "_Source") -> None:
        try:
            while not self._stopped and self._runners <= self._pool.limit:
                row = await source.next()
                if row is None:
                    return
                await self._finish(_Asked(row))
        finally:
            self._runners -= 1

    async def _finish(self, asked: _Asked) -> None:
        """Ask until the row is finished or set aside."""
        while (trouble := await self._ask(asked)) is not None:
            if asked.suspicions >= _ATTEMPTS_IN_COMPANY:
                self._set_aside.append(asked)
                return
            if self._stopped:
                self.tally.given_up += 1
                return
            # A worker that was not reached rests; another one may be asked at once.
            if trouble.fault is not Fault.UNREACHED:
                await asyncio.sleep(_backoff_s(asked.requests))

    async def _ask_alone(self) -> None:
        """The last lane: rows that were met by trouble, one at a time, with none of ours in flight."""
        while self._set_aside and not self._stopped:
            await self._finish_alone(self._set_aside.popleft())
            self._stopped = self._should_stop()
        self.tally.given_up += len(self._set_aside)

    async def _finish_alone(self, asked: _Asked) -> None:
        errors = 0
        while (trouble := await self._ask(asked)) is not None:
            if trouble.fault is Fault.ERROR:
                errors += 1
                if errors == _ATTEMPTS_ALONE and self.tally.answered:
                    self._fail(asked, "EngineError", trouble.message, None, 0.0)
                    return
            if trouble.fault is Fault.LOST or errors == _ATTEMPTS_ALONE:
                self.tally.given_up += 1
                return
            await asyncio.sleep(_backoff_s(errors))

    async def _ask(self, asked: _Asked) -> Trouble | None:
        """One request; None when it finished the row.

        Raises:
            Unavailable: there was nothing but trouble for too long.
        """
        worker = await self._pool.choose()
        worker.in_flight += 1
        asked.requests += 1
        began = time.monotonic()
        try:
            outcome = await self._engine.ask(worker.url, asked.row)
        finally:
            worker.in_flight -= 1
        latency_s = time.monotonic() - began
        if isinstance(outcome, Trouble):
            self._note(outcome)
            if outcome.fault is Fault.BUSY:
                worker.is_full(outcome.retry_after_s)
            else:
                worker.failed(outcome.retry_after_s, may_be_the_rows=outcome.fault is Fault.ERROR)
            if outcome.fault in (Fault.LOST, Fault.ERROR):
                asked.suspicions += 1
            return outcome
        worker.answered()
        self._last_answer = time.monotonic()
        self._troubles = 0
        if isinstance(outcome, Refused):
            self._fail(asked, outcome.error_class, outcome.message, worker.name, latency_s)
        else:
            self._answer(asked, outcome, worker.name, latency_s)
        return None

    def _note(self, trouble: Trouble) -> None:
        self._troubles += 1
        silent_s = time.monotonic() - self._last_answer
        if silent_s > self._patience_s and self._troubles > self._pool.limit:
            raise Unavailable(
                f"no worker has answered for {silent_s:.0f} s; the last one said: {trouble.message}. What is "
                f"answered is kept; look at the workers' logs, then run the stages start and run again"
            )

    def _answer(self, asked: _Asked, answered: Answered, worker: str, latency_s: float) -> None:
        self.tally.answered += 1
        if not self._proven:
            self._believe_refusals()
        self._sink(
            Result(
                id=asked.row.id,
                status="answered",
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


class _Source:
    """Rows from an iterator that may block: it is read one chunk ahead, in a thread."""

    def __init__(self, chunks: Iterator[list[Row]]) -> None:
        self._chunks = chunks
        self._rows: deque[Row] = deque()
        self._reading: asyncio.Future[list[Row] | None] | None = None
        self._exhausted = False

    @property
    def is_empty(self) -> bool:
        """Whether all rows were taken."""
        return self._exhausted and not self._rows

    async def next(self) -> Row | None:
        """The next row; None when there are no more."""
        while not self._rows and not self._exhausted:
            self._read_ahead()
            assert self._reading is not None
            # Shielded: a runner that is cancelled must not take the chunk with it.
            await asyncio.shield(self._reading)
            self._take_chunk()
        row = self._rows.popleft() if self._rows else None
        self._take_chunk()
        self._read_ahead()
        return row

    def _read_ahead(self) -> None:
        if self._reading is None and not self._exhausted:
            loop = asyncio.get_running_loop()
            self._reading = loop.run_in_executor(None, next, self._chunks, None)

    def _take_chunk(self) -> None:
        """Take the chunk that was read, once the rows before it are used up: one chunk ahead and no more."""
        if self._rows or self._reading is None or not self._reading.done():
            return
        chunk = self._reading.result()
        self._reading = None
        if chunk is None:
            self._exhausted = True
        else:
            self._rows.extend(chunk)


def _backoff_s(attempt: int) -> float:
    """Full jitter, so that rows that failed together do not come back together."""
    return random.uniform(0.0, min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S))
