"""One request: a row, a worker, and what it comes to."""

import time

from tasks.batch.engine import Answered, Engine, Fault, Refused, Trouble, Unfit
from tasks.batch.outcomes import Ended, InFlight, Outcomes
from tasks.batch.pace import Pace
from tasks.batch.records import Row
from tasks.batch.routing import Pool, Worker
from tasks.errors import Unavailable

_DRAWS = 3
"""Answers that the schema refuses, before the row is failed."""

_CANARY = Row("canary", '[{"role":"user","content":"Say yes."}]', prompt_tokens=4, max_tokens=4)


class Exchange:
    """Asks the workers of a pool, and keeps what is known about them up to date."""

    def __init__(
        self, engine: Engine, pool: Pool, pace: Pace, outcomes: Outcomes, *, patience_s: float
    ) -> None:
        """
        Args:
            patience_s: how long there may be trouble and no answer before `Unavailable` is raised.
        """
        self._engine = engine
        self._pool = pool
        self._pace = pace
        self._outcomes = outcomes
        self._patience_s = patience_s
        self._last_answer = time.monotonic()
        self._troubles = 0
        """Since the last answer."""

    async def ask(self, worker: Worker, asked: InFlight) -> str | Ended | Trouble | None:
        """The answer, or that the row has failed, or what hindered; None: to be asked again.

        Raises:
            Unavailable: there was nothing but trouble for too long.
            StageFailed: the engines refuse every row.
        """
        outcome, latency_s = await self._request(worker, asked)
        if isinstance(outcome, Trouble):
            return outcome
        worker.answered()
        self._last_answer = time.monotonic()
        self._troubles = 0
        if isinstance(outcome, Answered):
            self._pace.learn(latency_s, outcome.completion_tokens)
            self._outcomes.answer(asked, outcome, worker.name, latency_s)
            return outcome.text
        if isinstance(outcome, Unfit):
            self._pace.learn(latency_s, outcome.answered.completion_tokens)
            asked.unfit += 1
            if asked.unfit < _DRAWS:
                return None
        self._outcomes.fail(
            asked, outcome.error_class, outcome.message, worker=worker.name, latency_s=latency_s
        )
        return Ended.FAILED

    async def answers_a_canary(self, worker: Worker) -> bool:
        """Whether `worker` answers a chat that no engine minds."""
        outcome, _ = await self._request(worker, InFlight(_CANARY, _CANARY.messages))
        if isinstance(outcome, Answered | Unfit):
            worker.answered()
            return True
        return False

    async def _request(
        self, worker: Worker, asked: InFlight
    ) -> tuple[Answered | Refused | Unfit | Trouble, float]:
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
