"""The driver's work without Spark's: all rows in this process, for tests in which Spark would only cost time."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tasks.batch import answering, driver, limits, prepared, rows, segments, spark_task
from tasks.batch.records import Row
from tasks.batch.registering import Registrar
from tasks.ledger import Claim, load
from tasks.settings import Settings


def answer_without_spark(claim: Claim, settings: Settings, every_s: float = 0.1) -> None:
    """Ask what is to do, under the claim of stage `run`."""
    run = load(claim.ledger, claim.run_id)
    batch = prepared.of_run(claim.ledger, run.run_id)
    answers = rows.answers_of(claim.ledger, batch.batch_id, Path(run.spec.batch.output))
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
        every_s=every_s,
        tokens_left=limits.tokens_left(run, answers),
        stop_file=stop_file,
        tenant=run.spec.tenant,
        quota=settings.quota_of(run.spec.tenant),
    )
    with registrar:
        job = driver.job_of(
            run,
            claim.ledger,
            batch,
            answers,
            attempt=attempt,
            stop_file=stop_file,
            settings=settings,
            shares=1,
        )
        answering.answer(job, iter([to_do]), "p0")


def rows_of(table: pa.Table) -> list[Row]:
    """Prepared rows as they are asked; the input has no sessions."""
    names = [name for name in spark_task.COLUMNS if name != "finished"]
    return [Row(**row) for row in table.select(names).to_pylist()]
