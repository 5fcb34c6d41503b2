"""reconcile: prove, by id, that the input is answered + failed + not started, before anything is
published."""

from dataclasses import dataclass
from pathlib import Path

from tasks.batch import prepared, published, rows
from tasks.batch.rows import Survey
from tasks.contract import Context, Outcome
from tasks.errors import StageFailed
from tasks.ledger.claims import facts_of

_SHOWN_ERRORS = 5


@dataclass(frozen=True)
class Plan:
    """What counting finds now, and where the same count was proved before."""

    facts: dict[str, int]
    proved: str | None
    """For a person; None when these counts are new."""

    @property
    def satisfied(self) -> bool:
        """Whether nothing has changed since it was proved. Verify counts again in any case."""
        return self.proved is not None

    @property
    def reason(self) -> str:
        """For a person."""
        if self.proved is not None:
            return f"{self.proved} {_sum(self.facts)}"
        return "the rows are to be counted by id"


def plan(context: Context) -> Plan:
    """Count, and look for the same count in this run and in what is published."""
    batch, facts = prepared.of_run(context.claim.ledger, context.run.run_id), _facts(_count(context))
    if facts == facts_of(context.claim.ledger, context.run.run_id, "reconcile"):
        return Plan(facts, "still")
    manifest = published.manifest_of(_output(context), batch.batch_id)
    # Finished rows stay finished, so equal counts mean the same rows.
    if manifest is not None and facts == {name: manifest[name] for name in facts}:
        return Plan(facts, "as published:")
    return Plan(facts, None)


def apply(plan: Plan, context: Context) -> None:
    """Counting changes nothing."""


def verify(context: Context) -> Outcome:
    """Count, and refuse what must not be published.

    Raises:
        StageFailed: the count does not come out, too many rows failed, or rows are not started and the spec
            does not allow partial results.
    """
    counted = _count(context)
    limits = context.run.spec.limits
    if counted.strangers or counted.answered + counted.failed + counted.to_do != counted.rows:
        raise StageFailed(
            f"the count does not come out: {counted.rows} rows in, {_sum(_facts(counted))}, and "
            f"{counted.strangers} finished ids that are not in the input. Nothing is published; this is a "
            f"defect, please keep the segments and report it"
        )
    if counted.failed > limits.max_row_error_rate * counted.rows:
        errors = "; ".join(
            f"{count} x {name} ({counted.examples[name]})"
            for name, count in counted.errors.most_common(_SHOWN_ERRORS)
        )
        raise StageFailed(
            f"{counted.failed} of {counted.rows} rows failed, more than limits.max_row_error_rate = "
            f"{limits.max_row_error_rate} allows: {errors}. Nothing is published, the answers are kept: mend "
            f"the input, or raise the limit in a new run of the same batch"
        )
    if counted.to_do and not limits.partial:
        raise StageFailed(
            f"{counted.to_do} of {counted.rows} rows are not started, and limits.partial is false. "
            f"Nothing is published, the answers are kept: start the whole run again, once it has ended, for a "
            f"deadline that is over counts anew then (but where limits.deadline names a date: start another run of "
            f"the same batch), or allow partial results in another run"
        )
    return Outcome(_sum(_facts(counted)), _facts(counted))


def _output(context: Context) -> Path:
    return Path(context.run.spec.batch.output).absolute()


def _count(context: Context) -> Survey:
    batch = prepared.of_run(context.claim.ledger, context.run.run_id)
    answers = rows.answers_of(context.claim.ledger, batch.batch_id, _output(context))
    return rows.survey(batch, answers, context.run.spec)


def _facts(counted: Survey) -> dict[str, int]:
    return {
        "rows": counted.rows,
        "answered": counted.answered,
        "failed": counted.failed,
        "not_started": counted.to_do,
    }


def _sum(facts: dict[str, int]) -> str:
    return (
        f"{facts['rows']} rows = {facts['answered']} answered + {facts['failed']} failed + "
        f"{facts['not_started']} not started, by id"
    )
