"""What each of Spark's tasks does with its rows. Runs in Spark's Python workers, which get no database.

The pool's key reaches it inside the pickled function: Spark shows neither that nor its arguments anywhere.
"""

import ctypes
import os
import signal
from collections.abc import Iterator

import pyarrow as pa

from tasks.batch.answering import Job, answer
from tasks.batch.records import Row

SUMMARY = "share int, answered long, failed long, given_up long"
"""The schema of what a task returns: one row. Finished rows go to segments, not through Spark."""

_SUMMARY_SCHEMA = pa.schema(
    [("share", pa.int32()), ("answered", pa.int64()), ("failed", pa.int64()), ("given_up", pa.int64())]
)

_PR_SET_PDEATHSIG = 1


def ask_rows(job: Job, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: ask the rows (id, messages, prompt_tokens) of one partition."""
    from pyspark import TaskContext

    _end_with_parent()
    context = TaskContext.get()
    share = context.partitionId() if context is not None else 0
    tally = answer(job, _chunks(batches), f"p{share}")
    yield pa.record_batch(
        [[share], [tally.answered], [tally.failed], [tally.given_up]], schema=_SUMMARY_SCHEMA
    )


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[list[Row]]:
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("id", "messages", "prompt_tokens"))
        yield [Row(*values) for values in zip(*columns, strict=True)]


def _end_with_parent() -> None:
    """Let the kernel kill this worker when Spark's worker daemon dies, whose only thread forked it."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
