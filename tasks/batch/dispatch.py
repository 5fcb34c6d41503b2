"""Keep the engines full until the rows are used up. Knows nothing of Spark.

As many runners as rows may be in flight each take a row, ask until it is finished, and take the next: no
barrier between chunks of rows or at their ends, and the next chunk is read while the current one is out. The
turns of a session are one runner's, one after the other. Rows that company does not suit are asked alone at the
end: see `lanes`.
"""

import asyncio
import json
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

from tasks.batch.chats import joined, with_answer
from tasks.batch.engine import Engine
from tasks.batch.exchange import Exchange
from tasks.batch.lanes import Alone, Company
from tasks.batch.outcomes import Ended, InFlight, Outcomes, Tally
from tasks.batch.pace import Pace
from tasks.batch.records import Result, Row
from tasks.batch.routing import Pool
from tasks.batch.source import Source

_TICK_S = 0.5
"""How often the number of runners is brought in line with the pool, and the order to stop is looked for."""

_PREFIXES = 4096
"""Beginnings of which it is known which worker has them."""


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
        self._pool = pool
        self._should_stop = should_stop
        self._stopped = False
        self._outcomes = Outcomes(sink, release_id, proven=proven)
        exchange = Exchange(engine, pool, pace, self._outcomes, patience_s=patience_s)
        self._company = Company(exchange, pool, lambda: self._stopped)
        self._alone = Alone(exchange, pool, self._outcomes)
        self._lane: Company | Alone = self._company
        self._runners = 0
        self._set_aside: deque[list[Row]] = deque()
        self._workers_of_prefixes: OrderedDict[int, str] = OrderedDict()

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
            self._outcomes.end()
        tally = self._outcomes.tally
        tally.set_aside = sum(row.finished is None for unit in self._set_aside for row in unit)
        return tally

    async def run_alone(self, chunks: Iterator[list[Row]]) -> Tally:
        """Ask all rows of `chunks` one at a time, as rows that were set aside. Nobody else must be asking."""
        source = Source(chunks)
        async with _kept_up_to_date(self._pool):
            while (unit := await source.next()) is not None:
                self._set_aside.append(unit)
            await self._ask_alone()
            self._outcomes.end()
        return self._outcomes.tally

    async def _ask_in_company(self, source: Source, registry: asyncio.Task[None]) -> None:
        running: set[asyncio.Task[None]] = {registry}
        try:
            while not (source.is_empty or self._stopped) or len(running) > 1:
                self._stopped = self._stopped or self._should_stop()
                while self._runners < self._pool.limit and not (source.is_empty or self._stopped):
                    self._runners += 1
                    running.add(asyncio.create_task(self._runner(source)))
                self._outcomes.at_once(self._runners)
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
            asked = InFlight(row, joined(history, row.messages) if row.session is not None else row.messages)
            if row.finished is not None:
                answer = json.loads(row.finished)
            elif self._stopped and number:
                self._outcomes.tally.given_up += len(unit) - number
                return
            else:
                ended, preferred = await self._lane.finish(asked, preferred)
                if ended is Ended.LEFT:
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
        if self._stopped or self._lane is self._alone:
            self._outcomes.tally.given_up += sum(row.finished is None for row in unit[number:])
        else:
            self._set_aside.append(unit)

    def _fail_later_turns(self, rows: list[Row], earlier: Row) -> None:
        for row in rows:
            if row.finished is None:
                message = f"turn {earlier.id} of its session has no answer, so this one cannot be asked"
                self._outcomes.fail(InFlight(row, ""), "EarlierTurnFailed", message)

    async def _ask_alone(self) -> None:
        """The last lane: rows that were met by trouble, one at a time, with none of ours in flight."""
        self._lane = self._alone
        while self._set_aside and not self._stopped:
            await self._converse(self._set_aside.popleft())
            self._stopped = self._should_stop()
        self._outcomes.tally.given_up += sum(row.finished is None for unit in self._set_aside for row in unit)
        self._set_aside.clear()

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
