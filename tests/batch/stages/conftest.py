"""The stages of one batch, whose run is answered without Spark: Spark itself is in test_spark.py, and takes seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from tasks.batch import answering, driver, limits, prepared, rows, segments
from tasks.batch.registering import Registrar
from tasks.ledger import Claim, load
from tasks.spark import SparkSubmission
from tasks.stages import execute
from tests.batch.stages.working import rows_of
from tests.batch.world import World


@pytest.fixture
def submissions(world: World) -> list[SparkSubmission]:
    """Everything that was submitted instead of to Spark."""
    return []


@pytest.fixture
def run_stage(world: World, submissions: list[SparkSubmission]) -> Callable[[str], Any]:
    """Executes the stage `run` with the application in this process: the driver's work without Spark's."""

    def submit(submission: SparkSubmission) -> None:
        submissions.append(submission)
        _, run_id, _, epoch = submission.arguments
        with world.ledger() as ledger:
            _answer_without_spark(world, Claim(ledger, run_id, "run", int(epoch)))

    return lambda run_id: execute("run", run_id, settings=world.settings, submit=submit)


def _answer_without_spark(world: World, claim: Claim) -> None:
    run = load(claim.ledger, claim.run_id)
    batch = prepared.load(Path(driver._facts(claim.ledger, run, "prepare")["folder"]))
    answers = rows.answers_of(claim.ledger, batch.batch_id, world.output)
    table = rows.prepared_rows(batch, prepared.SCHEMA.names)
    is_open = pc.and_not(pc.is_null(answers.places_of(table.column("id"))), rows.never_sent(table, run.spec))
    to_do = rows_of(table.filter(is_open))
    attempt = segments.attempt_prefix(run.run_id, claim.epoch)
    stop_file = batch.folder / f"{attempt}stop"
    registrar = Registrar(
        claim,
        batch,
        attempt,
        finished=0,
        failed=0,
        every_s=0.1,
        tokens_left=limits.tokens_left(run, answers),
        stop_file=stop_file,
    )
    with registrar:
        job = driver.job_of(
            run,
            claim.ledger,
            batch,
            answers,
            attempt=attempt,
            stop_file=stop_file,
            settings=world.settings,
            shares=1,
        )
        answering.answer(job, iter([to_do]), "p0")
