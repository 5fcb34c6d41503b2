"""What Spark's driver does for the stage `prepare`: it hands out the parts of the input.

The files of the parts are all that comes back; the stage that submitted this reads them.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tasks.batch import files, prepared_part, submission
from tasks.batch.parts import Part
from tasks.batch.spark_task import end_with_parent
from tasks.ledger import Claim, Run
from tasks.settings import Settings
from tasks.spec import Batch

_WORK = "work.json"

_SHOW_EVERY_S = 2.0


@dataclass(frozen=True)
class Work:
    """What the stage asks for."""

    parts: list[Part]
    batch: Batch
    model: Path
    """The folder with the tokenizer; every executor sees it."""
    folder: Path
    """Where the parts' files go."""

    def show(self, claim: Claim) -> None:
        """Record how many rows are prepared, by the files that are there."""
        done = sum(part.rows for part in self.parts if prepared_part.path_of(part, self.folder).exists())
        claim.progress(done, sum(part.rows for part in self.parts), "rows")


def leave(work: Work, scratch: Path) -> None:
    """Write down for the driver what it is to do."""
    files.write_json(scratch / _WORK, _WORKS.dump_python(work, mode="json", by_alias=True))


def drive(run: Run, claim: Claim, settings: Settings) -> None:
    """Prepare the parts that the stage left."""
    from pyspark.sql import SparkSession

    document = files.read_json(submission.place(run.run_id, claim.stage, settings) / _WORK)
    work = _WORKS.validate_python(document)
    spark = SparkSession.builder.getOrCreate()
    try:
        with ThreadPoolExecutor(1, "spark") as threads:
            job = threads.submit(_write_all, spark.sparkContext, work)
            while not job.done():
                wait([job], _SHOW_EVERY_S)
                work.show(claim)
            job.result()
    finally:
        spark.stop()


def _write_all(context: Any, work: Work) -> None:
    write = partial(_write, work.batch, work.model, work.folder)
    context.parallelize(work.parts, len(work.parts)).foreachPartition(write)


def _write(batch: Batch, model: Path, folder: Path, parts: Iterator[Part]) -> None:
    """In one of Spark's Python workers."""
    end_with_parent()
    for part in parts:
        prepared_part.write(part, batch, model, folder)


_WORKS = TypeAdapter(Work)
