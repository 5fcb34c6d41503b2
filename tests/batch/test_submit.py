"""What a Spark application ended with, as an error that says whether a retry can help."""

from pathlib import Path

import pytest

from tasks.batch import spark_driver
from tasks.batch.spark_driver import FAILURE
from tasks.batch.submit import failure, submit_child
from tasks.errors import InputError, StageError, StageFailed, Unavailable
from tasks.spark import SparkSubmission

LOST = (
    "Job aborted due to stage failure: Task 3 in stage 1.0 failed 1 times, most recent failure: Lost task 3.0 in "
    "stage 1.0 (TID 5): org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)"
)


@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        ("kill -KILL $$", Unavailable),
        ("kill -TERM $$", Unavailable),
        ("exit 137", Unavailable),
        ("exit 143", Unavailable),
        (f"echo '{LOST}'; exit 1", Unavailable),
        ("echo 'ERROR: Lost executor 0 on 10.0.0.7: worker lost'; exit 1", Unavailable),
        ("echo 'row 137 is odd'; exit 1", StageFailed),
        (f"echo '{FAILURE}InputError: no such column'; exit 137", InputError),
    ],
)
def test_a_retry_can_help_where_a_process_of_the_application_was_killed(
    tmp_path: Path, ends: str, kind: type[StageError]
):
    binary = tmp_path / "spark-submit"
    binary.write_text(f"#!/bin/bash\n{ends}\n")
    binary.chmod(0o755)
    with pytest.raises(StageError) as caught:
        submit_child(SparkSubmission("name", binary, Path("entry.py"), (), log=tmp_path / "log"))
    assert type(caught.value) is kind


@pytest.mark.parametrize(("status", "kind"), [(-9, Unavailable), (137, Unavailable), (1, StageFailed)])
def test_airflows_operator_is_told_the_same_from_what_its_provider_says(status: int, kind: type[StageError]):
    said = f"Cannot execute: ['spark-submit', 'entry.py']. Error code is: {status}."
    assert type(failure(said.splitlines(), f"the Spark application failed: {said}")) is kind


def test_a_driver_that_lives_tells_of_processes_that_spark_lost():
    assert type(spark_driver._understood(RuntimeError(LOST))) is Unavailable
    told_by_a_task = f"{LOST}\ntasks.errors.StageFailed: the registry belongs to another pool"
    assert (
        str(spark_driver._understood(RuntimeError(told_by_a_task))) == "the registry belongs to another pool"
    )
    assert type(spark_driver._understood(RuntimeError("no such column"))) is StageFailed
