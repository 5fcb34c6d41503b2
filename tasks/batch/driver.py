"""The Spark driver of a run: it hands rows to Spark and registers what comes back.

It acts under the claim of the stage `run`, whose run id and epoch it is given. Keeps:
- it ends within seconds when that claim has ended, and when Spark's own process above it is gone;
- a finished row counts once its bytes are registered here, at most every few seconds;
- Spark gets ids, chats and token counts; answers go from the engines to segments, past Spark.
"""

import argparse
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tasks import pool_key
from tasks import settings as deployment
from tasks.batch import limits, prepared, rows, segments, spark_task, to_do
from tasks.batch.answering import Job
from tasks.batch.prepared import PreparedBatch
from tasks.batch.registering import Registrar
from tasks.errors import StageError, StageFailed, Unavailable
from tasks.ledger import Claim, Ledger, Run, load
from tasks.ledger.claims import facts_of
from tasks.settings import Settings
from tasks.watch import watching

log = logging.getLogger("tasks.batch.driver")

FAILURE = "qwen-pipeline failure: "
"""Begins the line that tells the stage, which reads the log, why the application failed."""

_PARENT_WATCH_S = 0.5

_RAISED_IN_TASK = re.compile(r"^\s*tasks\.errors\.(\w+): (.+)$", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Run the application; returns its exit status."""
    parser = argparse.ArgumentParser(description="Spark driver of the stage run; started by spark-submit.")
    parser.add_argument("--run", required=True)
    parser.add_argument("--epoch", required=True, type=int)
    options = parser.parse_args(arguments)
    settings = deployment.current()
    logging.basicConfig(
        level=settings.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("py4j").setLevel(logging.WARNING)
    _end_with_parent()
    try:
        with Ledger(settings.database_url(), settings.sql) as ledger:
            claim = Claim(ledger, options.run, "run", options.epoch)
            with watching(claim, settings.claim_watch_s):
                _drive(load(ledger, options.run), claim, settings)
    except StageError as error:
        print(f"{FAILURE}{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    return 0


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
        StageFailed: there is no pool.
    """
    pool = _facts(ledger, run, "start")
    if pool["pool_id"] is None:
        raise StageFailed("rows are to do, but no pool of workers was started: run the stage start again")
    return Job(
        registry=pool["registry"],
        key=pool_key.derive(settings.secret(), pool["pool_id"]),
        release_id=pool["model"],
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


def _drive(run: Run, claim: Claim, settings: Settings) -> None:
    ledger = claim.ledger
    batch = prepared.load(Path(_facts(ledger, run, "prepare")["folder"]))
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
            _ask(_Work(run, ledger, batch, work, attempt, stop_file, settings), registrar)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True)
class _Work:
    """What both passes over the rows need."""

    run: Run
    ledger: Ledger
    batch: PreparedBatch
    folder: Path
    """For files that Spark reads; gone afterwards."""
    attempt: str
    stop_file: Path
    settings: Settings

    def answers(self) -> rows.Answers:
        """What is finished by now."""
        return rows.answers_of(self.ledger, self.batch.batch_id, Path(self.run.spec.batch.output).absolute())

    def job(self, answers: rows.Answers, shares: int) -> Job:
        """See `job_of`."""
        return job_of(
            self.run,
            self.ledger,
            self.batch,
            answers,
            attempt=self.attempt,
            stop_file=self.stop_file,
            settings=self.settings,
            shares=shares,
        )


def _ask(work: _Work, registrar: Registrar) -> None:
    """Ask all rows in company, then, when nobody else asks, those that were set aside one at a time."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    registrar.spark_ui = spark.sparkContext.uiWebUrl
    try:
        answers = work.answers()
        shares = work.settings.spark_cores or spark.sparkContext.defaultParallelism
        job = work.job(answers, shares)
        set_aside = _pass(to_do.in_company(_frames(spark, work, answers), shares), job, alone=False)
        if set_aside and shares > 1 and not job.should_stop():
            registrar.register()
            answers = work.answers()
            frame = to_do.alone(_frames(spark, work, answers))
            _pass(frame, work.job(answers, shares=1), alone=True)
    except PySparkException as error:
        raise _understood(error) from error
    finally:
        spark.stop()


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


def _facts(ledger: Ledger, run: Run, stage: str) -> dict[str, Any]:
    facts = facts_of(ledger, run.run_id, stage)
    if facts is None:
        raise StageFailed(f"stage {stage} has not succeeded in run {run.run_id}: run it first")
    return facts


def _named(function: "partial[Any]") -> Any:
    """Spark shows a function's name in its plans; a partial object has none."""
    function.__name__ = "ask_rows"  # type: ignore[attr-defined]
    return function


def _understood(error: Exception) -> StageError:
    """What a task raised, out of Spark's report of it."""
    raised = _RAISED_IN_TASK.findall(str(error))
    if raised:
        name, message = raised[-1]
        return Unavailable(message) if name == "Unavailable" else StageFailed(message)
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    log.error("Spark failed", exc_info=error)
    return StageFailed(f"Spark failed: {first}; its log has the whole story")


def _end_with_parent() -> None:
    """End when Spark's process is gone: nothing here can go on then, and a successor must not meet us."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_WATCH_S)
        os._exit(StageFailed.exit_status)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
