"""The stages of one batch, whose run is answered without Spark: Spark itself is in test_spark.py, and takes seconds."""

from collections.abc import Callable
from typing import Any

import pytest

from tasks.batch import spark_driver
from tasks.ledger import Claim
from tasks.spark import SparkSubmission
from tasks.stages import execute
from tests.batch.without_spark import answer_without_spark
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
        options = spark_driver.parser().parse_args(submission.arguments)
        with world.ledger() as ledger:
            claim = Claim(ledger, options.run, options.stage, options.epoch)
            answer_without_spark(claim, world.settings)

    return lambda run_id: execute("run", run_id, settings=world.settings, submit=submit)
