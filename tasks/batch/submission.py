"""The Spark application of a stage of the batch: the one builder, for the command line and for Airflow's operator."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from tasks.contract import Context
from tasks.errors import InputError, StageFailed
from tasks.node import processes
from tasks.settings import Settings
from tasks.spark import SparkSubmission

_ENTRY = Path(__file__).parent / "spark_entry" / "entry.py"
_LOG4J2 = Path(__file__).parent / "log4j2.properties"

_ARROW_BATCH_ROWS = 256
"""Read ahead by a task while it asks: enough to keep a worker busy, little to hold."""

_SHUFFLE_PARTITIONS = 16


@contextmanager
def scratch(context: Context) -> Iterator[Path]:
    """An empty folder for the application's temporary files; gone after the block."""
    folder = place(context.run.run_id, context.claim.stage, context.settings)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place(run_id: str, stage: str, settings: Settings) -> Path:
    """Where that folder is; a run id may hold what Java's paths may not."""
    return settings.home / "spark" / sha256(f"{run_id}/{stage}".encode()).hexdigest()[:10]


def of(context: Context) -> SparkSubmission:
    """The Spark application of the stage's claim.

    Raises:
        InputError: see `ledger_url_file`.
    """
    run, claim, settings = context.run, context.claim, context.settings
    # Rows pass the JVM and are not computed on there: its optimizing compiler took 17 of 45 CPU-seconds of a
    # short application and brought nothing back.
    java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
    folder = place(run.run_id, claim.stage, settings)
    conf = {
        "spark.master": settings.spark_master,
        "spark.driver.memory": settings.spark_driver_memory,
        "spark.driver.extraJavaOptions": (
            f"{java} -Djava.io.tmpdir={folder} -Dlog4j2.configurationFile=file:{_LOG4J2}"
        ),
        "spark.local.dir": str(folder),
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
        name=f"qwen-pipeline {claim.stage} {run.run_id}",
        binary=spark_home(settings) / "bin/spark-submit",
        application=_ENTRY,
        arguments=("--run", run.run_id, "--stage", claim.stage, "--epoch", str(claim.epoch)),
        conf=conf,
        environment=processes.environment(f"{run.run_id}/{claim.stage}", _environment(folder, settings)),
        log=settings.logs / run.run_id / f"spark-{claim.stage}.log",
    )


def ledger_url_file(settings: Settings) -> Path:
    """The file from which Spark's processes read the ledger's URL.

    Raises:
        InputError: the URL is not in a file; Spark's processes must not inherit the URL itself.
    """
    if settings.ledger_url_file is None:
        raise InputError(
            "Spark's driver reads the ledger's URL from a file, so that the URL is in no environment: set "
            "QWEN_PIPELINE_LEDGER_URL_FILE to a 0600 file that holds it"
        )
    return settings.ledger_url_file


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


def _environment(scratch: Path, settings: Settings) -> Mapping[str, str]:
    """What Spark needs beside the usual: its interpreters, and this deployment's settings without secrets."""
    paths = {
        "HOME": settings.home,
        "LEDGER_URL_FILE": ledger_url_file(settings),
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
    java = {"JAVA_HOME": str(settings.java_home)} if settings.java_home is not None else {}
    return {
        **{f"QWEN_PIPELINE_{name}": str(value) for name, value in {**paths, **knobs}.items()},
        "SPARK_HOME": str(spark_home(settings)),
        "PYSPARK_PYTHON": str(settings.python_spark),
        "PYSPARK_DRIVER_PYTHON": str(settings.python_spark),
        # Where the driver listens for its executors; loopback unless Spark runs on other hosts.
        "SPARK_LOCAL_IP": settings.serve_host,
        "TMPDIR": str(scratch),
        # One Python worker for each core counts tokens already.
        "TOKENIZERS_PARALLELISM": "false",
        **java,
    }
