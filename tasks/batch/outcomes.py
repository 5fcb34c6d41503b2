"""What becomes of the rows: each finished one goes to the sink once, and is counted.

Refusals before the first answer are held back: where every row that is asked is refused, a worker that is set up
wrongly is the likelier reason, and no row is recorded as failed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tasks.batch.engine import Answered, Trouble
from tasks.batch.records import Result, Row
from tasks.errors import StageFailed

_REFUSALS_OF_ALL = 20
"""Rows refused and none answered, below which the fault may be theirs."""


@dataclass
class Tally:
    """What became of the rows that a dispatcher took."""

    answered: int = 0
    failed: int = 0
    given_up: int = 0
    """Not started: the run stopped, or the engines failed on them again and again."""
    set_aside: int = 0
    """To be asked alone."""


class Ended(Enum):
    """How asking a row ended without an answer."""

    FAILED = "failed"
    LEFT = "left"


@dataclass
class InFlight:
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


class Outcomes:
    """Where finished rows are written down."""

    def __init__(self, sink: Callable[[Result], None], release_id: str, *, proven: bool) -> None:
        """
        Args:
            sink: gets each finished row, in the order in which they finish.
            proven: whether these engines are known to answer this batch; if not, refusals count from the
                first answer on.
        """
        self._sink = sink
        self._release_id = release_id
        self._proven = proven
        self._held: list[Result] = []
        self._refused = 0
        """Of those that are held, the ones that were asked."""
        self._first_wave = _REFUSALS_OF_ALL
        self.tally = Tally()

    def at_once(self, rows: int) -> None:
        """So many rows are in flight: refusals of fewer say nothing, they come sooner than answers."""
        self._first_wave = max(self._first_wave, rows)

    def answer(self, asked: InFlight, answered: Answered, worker: str, latency_s: float) -> None:
        """The row has an answer."""
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

    def fail(
        self,
        asked: InFlight,
        error_class: str,
        message: str,
        *,
        worker: str | None = None,
        latency_s: float = 0.0,
    ) -> None:
        """The row will have no answer.

        Raises:
            StageFailed: a whole first wave is refused and none is answered, so the fault is not theirs.
        """
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
        self._refused += result.attempts > 0
        if self._refused >= self._first_wave:
            self._blame_workers()

    def end(self) -> None:
        """No row is asked any more: what was refused has failed.

        Raises:
            StageFailed: all of so many rows are refused that the fault is not theirs.
        """
        if self._refused >= _REFUSALS_OF_ALL:
            self._blame_workers()
        self._believe_refusals()

    def _believe_refusals(self) -> None:
        """The engines answer this batch: what was refused has failed."""
        self._proven = True
        for result in self._held:
            self._sink(result)
        self._held.clear()
        self._refused = 0

    def _blame_workers(self) -> None:
        last = next(result for result in reversed(self._held) if result.attempts)
        raise StageFailed(
            f"the first {self._refused} rows were refused and none was answered; the last one because: "
            f"{last.error_message}. No row is recorded as failed: see whether the workers serve what the batch "
            f"asks for"
        )
