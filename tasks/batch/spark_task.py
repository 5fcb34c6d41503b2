"""What each of Spark's tasks does with its rows. Runs in Spark's Python workers, which get no database.

The pool's key reaches it inside the pickled function: Spark shows neither that nor its arguments anywhere.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import fields

import pyarrow as pa

from tasks.batch.answering import Job, answer
from tasks.batch.records import Row

SUMMARY = "share int, answered long, failed long, given_up long, set_aside long"
"""The schema of what a task returns: one row. Finished rows go to segments, not through Spark."""

_SUMMARY_SCHEMA = pa.schema(
    [
        ("share", pa.int32()),
        *((name, pa.int64()) for name in ("answered", "failed", "given_up", "set_aside")),
    ]
)

COLUMNS = [field.name for field in fields(Row)]

_PR_SET_PDEATHSIG = 1


def ask_rows(job: Job, alone: bool, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: ask the rows (the columns of `records.Row`) of one partition."""
    from pyspark import TaskContext

    end_with_parent()
    context = TaskContext.get()
    share = context.partitionId() if context is not None else 0
    tally = answer(job, chunks_of(batches), f"{'alone' if alone else 'p'}{share}", alone=alone)
    counts = (tally.answered, tally.failed, tally.given_up, tally.set_aside)
    yield pa.record_batch([[share], *([count] for count in counts)], schema=_SUMMARY_SCHEMA)


def chunks_of(batches: Iterator[pa.RecordBatch]) -> Iterator[list[Row]]:
    """Rows out of columns that are called like the fields of `Row`."""
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in COLUMNS)
        yield [Row(*values) for values in zip(*columns, strict=True)]


def end_with_parent() -> None:
    """Let the kernel kill this worker when Spark's worker daemon dies, whose only thread forked it."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
