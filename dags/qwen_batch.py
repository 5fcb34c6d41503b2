"""Prompts in, answers out, GPUs given back.

A run downloads weights, converts them, prepares the rows, takes devices, starts vLLM workers, sends the rows by
Spark, proves the count and publishes the answers. Stop, restore and judge are teardowns of the first task, so
they run whatever fails in between. Start it from the form, by a schedule, or over REST with a run spec as conf.
"""

from airflow.sdk import dag
from pipeline_tasks import freeze, judge, run_spec_params, stage
from run_batch_operator import RunBatchOperator


@dag(
    schedule=None, catchup=False, max_active_runs=16, params=run_spec_params(), tags=["qwen"], doc_md=__doc__
)
def qwen_batch() -> None:
    """See the text above."""
    frozen = freeze().as_setup()
    checked = stage("preflight")
    downloaded = stage("download")
    converted = stage("convert")
    prepared = stage("prepare")
    provisioned = stage("provision").as_setup()
    started = stage("start").as_setup()
    answered = RunBatchOperator(task_id="run", conn_id="spark_default")
    reconciled = stage("reconcile")
    published = stage("publish")
    stopped = stage("stop")
    restored = stage("restore")
    judged = judge()

    frozen >> checked >> downloaded >> [converted, prepared]
    # No device is taken before weights and rows are both known to be good.
    [converted, prepared] >> provisioned >> started >> answered >> reconciled >> published

    # Devices go back while the answers are still being published.
    (
        answered
        >> stopped.as_teardown(setups=[frozen, started])
        >> restored.as_teardown(setups=[frozen, provisioned])
    )
    [published, restored] >> judged.as_teardown(setups=frozen, on_failure_fail_dagrun=True)


qwen_batch()
