"""The two ways in which a row is asked until it is finished: in company, and alone.

Trouble with a worker sends a row to another one. A row that was in an engine when it went away, twice, or that
engines failed on again and again, is left for the lane in which rows are asked one at a time: only what fails
there, at engines that answer others, is failed; otherwise it stays not started.
"""

import asyncio
import random
from collections.abc import Callable

from tasks.batch.engine import Fault, Trouble
from tasks.batch.exchange import Exchange
from tasks.batch.outcomes import Ended, InFlight, Outcomes
from tasks.batch.routing import Pool, Worker

_DEATHS_IN_COMPANY = 2
"""Engines that went away or fell silent with a row in them, before it is set aside."""

_ERRORS_IN_COMPANY = 5

_STRIKES_ALONE = 2

_FAILED_ALONE = {
    Fault.LOST: "KillsEngine",
    Fault.SILENT: "NoAnswerInTime",
    Fault.ERROR: "EngineError",
}

_CANARY_TRIES = 5

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


class Company:
    """Rows asked beside each other."""

    def __init__(self, exchange: Exchange, pool: Pool, is_stopped: Callable[[], bool]) -> None:
        self._exchange = exchange
        self._pool = pool
        self._is_stopped = is_stopped

    async def finish(self, asked: InFlight, preferred: str | None) -> tuple[str | Ended, str | None]:
        """Ask until the row is finished or to be left; returns its answer, and which worker gave it."""
        while True:
            worker = await self._pool.choose(preferred)
            outcome = await self._exchange.ask(worker, asked)
            if isinstance(outcome, str | Ended):
                return outcome, worker.name
            if isinstance(outcome, Trouble):
                asked.deaths += outcome.fault in (Fault.LOST, Fault.SILENT)
                asked.errors += outcome.fault is Fault.ERROR
            is_suspect = asked.deaths >= _DEATHS_IN_COMPANY or asked.errors >= _ERRORS_IN_COMPANY
            if is_suspect or self._is_stopped():
                return Ended.LEFT, None
            # A worker that was not reached rests; another one may be asked at once.
            if isinstance(outcome, Trouble) and outcome.fault is not Fault.UNREACHED:
                await asyncio.sleep(_backoff_s(asked.requests))


class Alone:
    """Rows that were met by trouble, with none of ours beside them."""

    def __init__(self, exchange: Exchange, pool: Pool, outcomes: Outcomes) -> None:
        self._exchange = exchange
        self._pool = pool
        self._outcomes = outcomes

    async def finish(self, asked: InFlight, preferred: str | None) -> tuple[str | Ended, str | None]:
        """Ask until the row is finished or found to be at fault, or the engines are; returns as `Company` does."""
        while len(asked.strikes) < _STRIKES_ALONE:
            # Else an engine that died of something else, and was asked again before it was back, would be two strikes.
            worker = await self._worker_that_answers_others(preferred)
            if worker is None:
                return Ended.LEFT, None
            outcome = await self._exchange.ask(worker, asked)
            if isinstance(outcome, str | Ended):
                return outcome, worker.name
            if outcome is None:
                continue
            if outcome.fault in _FAILED_ALONE:
                asked.strikes.append(outcome)
                # What a row does alone is not its slot's fault: one that was given up because of it is tried again.
                await self._pool.retry_slots()
            await asyncio.sleep(_backoff_s(len(asked.strikes)))
        last = asked.strikes[-1]
        if await self._worker_that_answers_others() is None:
            return Ended.LEFT, None
        message = f"asked alone {len(asked.strikes)} times, while the engines answer others: {last.message}"
        self._outcomes.fail(asked, _FAILED_ALONE[last.fault], message)
        return Ended.FAILED, None

    async def _worker_that_answers_others(self, preferred: str | None = None) -> Worker | None:
        """One that has just answered a canary; None when none does."""
        for number in range(_CANARY_TRIES):
            worker = await self._pool.choose(preferred)
            if await self._exchange.answers_a_canary(worker):
                return worker
            preferred = None
            await asyncio.sleep(_backoff_s(number + 2))
        return None


def _backoff_s(attempt: int) -> float:
    """Full jitter, so that rows that failed together do not come back together."""
    return random.uniform(0.0, min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S))
