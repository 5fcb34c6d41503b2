"""What Spark's driver does for the stage `run`: it hands rows to Spark and registers what comes back.

Keeps:
- a finished row counts once its bytes are registered here, at most every few seconds;
- Spark gets ids, chats and token counts; answers go from the engines to segments, past Spark.
"""

import logging
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tasks import pool_key
from tasks.batch import limits, pool, prepared, rows, segments, spark_task, to_do
from tasks.batch.answering import Job
from tasks.batch.prepared import PreparedBatch
from tasks.batch.registering import Registrar
from tasks.ledger import Claim, Ledger, Run
from tasks.settings import Settings

log = logging.getLogger("tasks.batch.driver")


def job_of(
    run: Run,
    ledger: Ledger,
    batch: PreparedBatch,
    answers: rows.Answers,
    *,
    attempt: str,
    stop_file: Path,
    settings: Settings,
    shares: int,
) -> Job:
    """What the dispatchers of this run are told; `shares` of them work at once.

    Raises:
        StageFailed: there is no pool, or it has ended.
    """
    found = pool.of_run(ledger, run.run_id)
    return Job(
        registry=found["registry"],
        key=pool_key.derive(settings.secret(), found["pool_id"]),
        release_id=found["model"],
        sampling=run.spec.batch.sampling.model_dump(mode="json", exclude_none=True),
        schema=run.spec.batch.answer_schema,
        segments=batch.segments,
        attempt=attempt,
        max_model_len=run.spec.serving.max_model_len if run.spec.batch.too_long == "truncate" else None,
        proven=answers.has_answers,
        stop_file=stop_file,
        stop_at=limits.stop_at(run),
        shares=shares,
        request_timeout_s=settings.request_timeout_s,
        request_timeout_least_s=min(settings.request_timeout_least_s, settings.request_timeout_s),
        patience_s=settings.engine_patience_s,
        registry_poll_s=settings.registry_poll_s,
        flush_s=settings.segment_flush_s,
    )


def drive(run: Run, claim: Claim, settings: Settings) -> None:
    """Ask the rows that are still to do."""
    ledger = claim.ledger
    batch = prepared.of_run(ledger, run.run_id)
    answers = rows.answers_of(ledger, batch.batch_id, Path(run.spec.batch.output).absolute())
    counted = rows.survey(batch, answers, run.spec)
    attempt = segments.attempt_prefix(run.run_id, claim.epoch)
    work = batch.folder / "work" / attempt.rstrip("-")
    work.mkdir(parents=True, exist_ok=True)
    stop_file = work / "stop"
    registrar = Registrar(
        claim,
        batch,
        attempt,
        finished=counted.answered + counted.failed,
        failed=counted.failed,
        every_s=settings.segment_flush_s,
        tokens_left=limits.tokens_left(run, answers),
        stop_file=stop_file,
        tenant=run.spec.tenant,
        quota=settings.quota_of(run.spec.tenant),
    )
    try:
        with registrar:
            _ask(_Work(run, claim, batch, work, attempt, stop_file, settings), registrar)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True)
class _Work:
    """What both passes over the rows need."""

    run: Run
    claim: Claim
    batch: PreparedBatch
    folder: Path
    """For files that Spark reads; gone afterwards."""
    attempt: str
    stop_file: Path
    settings: Settings

    def answers(self) -> rows.Answers:
        """What is finished by now."""
        return rows.answers_of(
            self.claim.ledger, self.batch.batch_id, Path(self.run.spec.batch.output).absolute()
        )

    def job(self, answers: rows.Answers, shares: int) -> Job:
        """See `job_of`."""
        return job_of(
            self.run,
            self.claim.ledger,
            self.batch,
            answers,
            attempt=self.attempt,
            stop_file=self.stop_file,
            settings=self.settings,
            shares=shares,
        )


def _ask(work: _Work, registrar: Registrar) -> None:
    """Ask in Spark's tasks until all is done, or the pool has ended."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    pool_id = pool.of_run(work.claim.ledger, work.run.run_id)["pool_id"]
    every_s = work.settings.claim_watch_s
    spark = SparkSession.builder.getOrCreate()
    registrar.spark_ui = spark.sparkContext.uiWebUrl
    try:
        with pool.watched(work.claim, pool_id, every_s, spark.sparkContext.cancelAllJobs):
            _ask_all(spark, work, registrar)
    except (PySparkException, Py4JJavaError):
        # Where the pool has ended, that is the reason.
        pool.of_run(work.claim.ledger, work.run.run_id)
        raise
    finally:
        spark.stop()


def _ask_all(spark: Any, work: _Work, registrar: Registrar) -> None:
    """Ask all rows in company, then, when nobody else asks, those that were set aside one at a time."""
    answers = work.answers()
    shares = work.settings.spark_cores or spark.sparkContext.defaultParallelism
    job = work.job(answers, shares)
    set_aside = _pass(to_do.in_company(_frames(spark, work, answers), shares), job, alone=False)
    if set_aside and shares > 1 and not job.should_stop():
        registrar.register()
        answers = work.answers()
        frame = to_do.alone(_frames(spark, work, answers))
        _pass(frame, work.job(answers, shares=1), alone=True)


def _frames(spark: Any, work: _Work, answers: rows.Answers) -> Any:
    return to_do.rows_to_do(spark, work.batch, answers, work.run.spec, work.folder)


def _pass(frame: Any, job: Job, *, alone: bool) -> int:
    """One pass over rows; returns how many were set aside."""
    ask = _named(partial(spark_task.ask_rows, job, alone))
    set_aside = 0
    for one in frame.mapInArrow(ask, spark_task.SUMMARY).collect():
        log.info("share %d: %d answered, %d failed, %d given up, %d set aside", *one)
        set_aside += one["set_aside"]
    return set_aside


def _named(function: "partial[Any]") -> Any:
    """Spark shows a function's name in its plans; a partial object has none."""
    function.__name__ = "ask_rows"  # type: ignore[attr-defined]
    return function
