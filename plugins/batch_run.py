"""The story of one run, as `qwen_batch` and every nightly DAG tell it."""

from typing import Any

from pipeline_tasks import judge, stage, with_links
from spark_stage_operator import SparkStageOperator


def batch_run(frozen: Any, node: str | None = None) -> None:
    """Put the tasks of a run into the DAG that is being made.

    Args:
        frozen: the first one, which starts the run.
        node: whose queue the stages go to that act on a node; None: the default queue.
    """
    frozen = frozen.as_setup()
    checked = stage("preflight", node)
    downloaded = stage("download", node)
    converted = stage("convert", node)
    prepared = SparkStageOperator(task_id="prepare", conn_id="spark_default")
    provisioned = stage("provision", node).as_setup()
    started = stage("start", node).as_setup()
    answered = SparkStageOperator(task_id="run", conn_id="spark_default")
    reconciled = stage("reconcile", node)
    published = stage("publish", node)
    stopped = stage("stop", node)
    restored = stage("restore", node)
    judged = with_links(judge())

    frozen >> checked >> downloaded >> [converted, prepared]
    # No device is taken before weights and rows are both known to be good.
    [converted, prepared] >> provisioned >> started >> answered >> reconciled >> published

    # Devices go back while the answers are still being published.
    (
        answered
        >> stopped.as_teardown(setups=[frozen, started])
        >> restored.as_teardown(setups=[frozen, provisioned])
    )
    # A teardown, so that it runs whatever failed; of no setup, so that it runs where none has, too.
    [published, restored] >> judged.as_teardown(on_failure_fail_dagrun=True)
