"""Prompts in, answers out, GPUs given back.

A run downloads weights, converts them, prepares the rows, takes devices, starts vLLM workers, sends the rows by
Spark, proves the count and publishes the answers. Stop, restore and judge are teardowns of the first task, so
they run whatever fails in between. Start it from the form or over REST with a run spec as conf; what runs by
itself every night is described in files, see `qwen_nightly`.
"""

from airflow.sdk import dag
from batch_run import batch_run
from deadline_alert import warning
from pipeline_tasks import freeze, run_spec_params
from run_notifications import notifications

from tasks.spec import RunSpec


@dag(
    schedule=None,
    is_paused_upon_creation=False,  # nothing starts by itself, and a run of a paused DAG stays queued
    catchup=False,
    max_active_runs=16,
    params=run_spec_params(),
    deadline=warning(),
    tags=["qwen"],
    doc_md=__doc__,
    **notifications(),
)
def qwen_batch() -> None:
    """See the text above."""
    batch_run(freeze(by_hand=RunSpec))


qwen_batch()
