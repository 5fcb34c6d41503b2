"""run: send the rows that are still to do to the pool's workers, by Spark.

Keeps:
- when no row is to do, Spark is not started;
- one run writes to a batch at a time: another one waits, and then finds most of it done;
- what a killed attempt wrote is registered before anything is asked, so it is not asked again.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.batch import in_ledger, limits, pool, prepared, rows, submission, writing
from tasks.batch.prepared import PreparedBatch
from tasks.contract import Context, Outcome
from tasks.errors import Busy

log = logging.getLogger(__name__)

_WAIT_STEP_S = 2.0


@dataclass(frozen=True)
class Plan:
    """How many rows are still to do, and whether they may be started."""

    batch: PreparedBatch
    to_do: int
    unregistered_rows: int
    """Finished rows that a killed attempt left unregistered."""
    limit: str | None
    """The limit that the run has reached, if so."""

    @property
    def satisfied(self) -> bool:
        """Whether no row is to be asked."""
        return not self.unregistered_rows and (self.to_do == 0 or self.limit is not None)

    @property
    def reason(self) -> str:
        """For a person."""
        if self.to_do == 0:
            return "every row is answered or failed"
        if self.limit is not None:
            return f"{self.to_do} rows are to do, but the run has reached {self.limit}"
        return f"{self.to_do} of {self.batch.rows} rows are to do"


def plan(context: Context) -> Plan:
    """Count what is still to do.

    Raises:
        StageFailed: the batch is not prepared, or rows are to do and there is no pool of workers, or it has ended.
    """
    ledger, run = context.claim.ledger, context.run
    batch = prepared.of_run(ledger, run.run_id)
    answers = rows.answers_of(ledger, batch.batch_id, Path(run.spec.batch.output).absolute())
    found = Plan(
        batch,
        rows.survey(batch, answers, run.spec).to_do,
        sum(one.rows for one in rows.unregistered(ledger, batch)),
        limits.reached(run, answers, ledger, context.settings),
    )
    if not found.satisfied and found.to_do and found.limit is None:
        pool.of_run(ledger, run.run_id)
    return found


def apply(planned: Plan, context: Context) -> None:
    """Become the batch's writer, take over what killed attempts left, ask the rest."""
    _become_writer(context, planned.batch.batch_id)
    rows.adopt(context.claim, planned.batch)
    # Another run of the same batch, or a killed attempt, may have finished rows since the plan was made.
    if not plan(context).satisfied:
        with submission.scratch(context):
            context.submit(submission.of(context))


def verify(context: Context) -> Outcome:
    """Count again, by id."""
    claim, run = context.claim, context.run
    batch = prepared.of_run(claim.ledger, run.run_id)
    answers = rows.answers_of(claim.ledger, batch.batch_id, Path(run.spec.batch.output).absolute())
    counted = rows.survey(batch, answers, run.spec)
    asked, seconds = in_ledger.pace(claim, batch.batch_id)
    rows_per_s = round(asked / seconds, 2) if seconds else 0.0
    facts = {
        "answered": counted.answered,
        "failed": counted.failed,
        "not_started": counted.to_do,
        "prompt_tokens": answers.prompt_tokens,
        "completion_tokens": answers.completion_tokens,
        "rows_per_s": rows_per_s,
    }
    message = f"{counted.answered} rows answered, {counted.failed} failed"
    if counted.to_do:
        limit = limits.reached(run, answers, claim.ledger, context.settings)
        because = f"the run reached {limit}" if limit else "the engines failed on them again and again"
        message += f", {counted.to_do} not started because {because}"
    if asked:
        message += f"; {asked} of them now, {rows_per_s} rows/s"
    return Outcome(message, facts)


def _become_writer(context: Context, batch_id: str) -> None:
    """Wait for another run that writes to the batch."""
    deadline = time.monotonic() + context.settings.batch_wait_s
    said = False
    while (other := writing.become_writer(context, batch_id)) is not None:
        if time.monotonic() > deadline:
            raise Busy(
                f"run {other.run_id} is at work on the same batch {batch_id} (stage {other.stage}, host "
                f"{other.process.host}, pid {other.process.pid}) and was not done within "
                f"{context.settings.batch_wait_s:.0f} s; try again when it is"
            )
        if not said:
            log.info("waiting for run %s, which is at work on the same batch", other.run_id)
            said = True
        time.sleep(_WAIT_STEP_S)
