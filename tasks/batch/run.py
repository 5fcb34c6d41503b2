"""run: send the rows that are still to do to the pool's workers, by Spark.

Keeps:
- when no row is to do, Spark is not started;
- one run writes to a batch at a time: another one waits, and then finds most of it done;
- what a killed attempt wrote is registered before anything is asked, so it is not asked again.
"""

import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tasks.batch import in_ledger, limits, prepared, rows, writing
from tasks.batch.prepared import PreparedBatch
from tasks.contract import Context, Outcome
from tasks.errors import Busy, InputError, StageFailed
from tasks.ledger import Ledger, Run
from tasks.ledger.claims import facts_of
from tasks.node import processes
from tasks.settings import Settings
from tasks.spark import SparkSubmission

log = logging.getLogger(__name__)

_ENTRY = Path(__file__).parent / "spark_entry" / "entry.py"
_LOG4J2 = Path(__file__).parent / "log4j2.properties"

_ARROW_BATCH_ROWS = 256
"""Read ahead by a task while it asks: enough to keep a worker busy, little to hold."""

_SHUFFLE_PARTITIONS = 16

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
        StageFailed: the batch is not prepared, or rows are to do and there is no pool of workers.
    """
    ledger, run = context.claim.ledger, context.run
    batch = _batch(ledger, run)
    answers = rows.answers_of(ledger, batch.batch_id, Path(run.spec.batch.output).absolute())
    found = Plan(
        batch,
        rows.survey(batch, answers, run.spec).to_do,
        sum(one.rows for one in rows.unregistered(ledger, batch)),
        limits.reached(run, answers, ledger, context.settings),
    )
    if not found.satisfied and found.to_do and found.limit is None:
        pool = facts_of(ledger, run.run_id, "start")
        if pool is None or pool["pool_id"] is None:
            raise StageFailed(
                f"{found.to_do} rows are to do, but no pool of workers runs: run the stage start"
            )
    return found


def apply(planned: Plan, context: Context) -> None:
    """Become the batch's writer, take over what killed attempts left, ask the rest."""
    _become_writer(context, planned.batch.batch_id)
    rows.adopt(context.claim, planned.batch)
    # Another run of the same batch, or a killed attempt, may have finished rows since the plan was made.
    if not plan(context).satisfied:
        scratch = _scratch(context.run, context.settings)
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            context.submit(submission(context.run, context.claim.epoch, context.settings))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def verify(context: Context) -> Outcome:
    """Count again, by id."""
    claim, run = context.claim, context.run
    batch = _batch(claim.ledger, run)
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


def submission(run: Run, epoch: int, settings: Settings) -> SparkSubmission:
    """The Spark application of a run's claim: the one builder, for the command line and for Airflow's
    operator.

    Raises:
        InputError: the ledger's URL is not in a file; Spark's processes must not inherit the URL itself.
    """
    if settings.ledger_url_file is None:
        raise InputError(
            "Spark's driver reads the ledger's URL from a file, so that the URL is in no environment: set "
            "QWEN_PIPELINE_LEDGER_URL_FILE to a 0600 file that holds it"
        )
    # Rows pass the JVM and are not computed on there: its optimizing compiler took 17 of 45 CPU-seconds of a
    # short application and brought nothing back.
    java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
    scratch = _scratch(run, settings)
    conf = {
        "spark.master": settings.spark_master,
        "spark.driver.memory": settings.spark_driver_memory,
        "spark.driver.extraJavaOptions": (
            f"{java} -Djava.io.tmpdir={scratch} -Dlog4j2.configurationFile=file:{_LOG4J2}"
        ),
        "spark.local.dir": str(scratch),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.eventLog.enabled": "false",
        # A second copy of a slow task would ask its rows twice.
        "spark.speculation": "false",
        "spark.python.worker.reuse": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(_ARROW_BATCH_ROWS),
        # Partitions that are joined together share one dispatcher, and leave cores without one.
        "spark.sql.adaptive.coalescePartitions.enabled": "false",
        # Of the join with finished rows; its default of 200 is 200 tasks to start, each with nearly nothing to do.
        "spark.sql.shuffle.partitions": str(_SHUFFLE_PARTITIONS),
        "spark.sql.session.timeZone": "UTC",
        **_cores(settings),
        **settings.spark_conf,
    }
    return SparkSubmission(
        name=f"qwen-pipeline {run.run_id}",
        binary=spark_home(settings) / "bin/spark-submit",
        application=_ENTRY,
        arguments=("--run", run.run_id, "--epoch", str(epoch)),
        conf=conf,
        environment=processes.environment(f"{run.run_id}/run", _spark_environment(run, settings)),
        log=settings.logs / run.run_id / "spark.log",
    )


def _cores(settings: Settings) -> dict[str, str]:
    """So many tasks at once, and not before there is room for all: they divide the engines among them."""
    if settings.spark_cores is None or settings.spark_master.startswith("local"):
        return {}
    return {
        "spark.cores.max": str(settings.spark_cores),
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    }


def spark_home(settings: Settings) -> Path:
    """Where pyspark lies in the Spark environment.

    Raises:
        StageFailed: it is not installed there.
    """
    found = sorted(settings.python_spark.parent.parent.glob("lib/python3*/site-packages/pyspark"))
    if not found:
        raise StageFailed(f"pyspark is not installed beside {settings.python_spark}: run `make setup`")
    return found[0]


def _spark_environment(run: Run, settings: Settings) -> Mapping[str, str]:
    """What Spark needs beside the usual: its interpreters, and this deployment's settings without secrets."""
    paths = {
        "HOME": settings.home,
        "LEDGER_URL_FILE": settings.ledger_url_file,
        "SECRET_FILE": settings.secret_file or settings.home / "secret",
        "SQL": settings.sql,
    }
    knobs = {
        "NODE": settings.node,
        "CLAIM_WATCH_S": settings.claim_watch_s,
        "REGISTRY_POLL_S": settings.registry_poll_s,
        "SEGMENT_FLUSH_S": settings.segment_flush_s,
        "REQUEST_TIMEOUT_S": settings.request_timeout_s,
        "ENGINE_PATIENCE_S": settings.engine_patience_s,
        "LOG_LEVEL": settings.log_level,
        "QUOTAS": json.dumps({name: one.model_dump(mode="json") for name, one in settings.quotas.items()}),
    }
    scratch = _scratch(run, settings)
    scratch.mkdir(parents=True, exist_ok=True)
    java = {"JAVA_HOME": str(settings.java_home)} if settings.java_home is not None else {}
    return {
        **{f"QWEN_PIPELINE_{name}": str(value) for name, value in {**paths, **knobs}.items()},
        "SPARK_HOME": str(spark_home(settings)),
        "PYSPARK_PYTHON": str(settings.python_spark),
        "PYSPARK_DRIVER_PYTHON": str(settings.python_spark),
        # Where the driver listens for its executors; loopback unless Spark runs on other hosts.
        "SPARK_LOCAL_IP": settings.serve_host,
        "TMPDIR": str(scratch),
        **java,
    }


def _scratch(run: Run, settings: Settings) -> Path:
    """Spark's temporary files; a run id may hold what Java's paths may not."""
    return settings.home / "spark" / sha256(run.run_id.encode()).hexdigest()[:10]


def _batch(ledger: Ledger, run: Run) -> PreparedBatch:
    facts = facts_of(ledger, run.run_id, "prepare")
    if facts is None:
        raise StageFailed("the batch is not prepared: run the stage prepare first")
    return prepared.load(Path(facts["folder"]))


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
