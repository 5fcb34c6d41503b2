"""Ends what outlived its lease or its run, on every node, every few minutes.

The second line of defence: the first is a timer of each node's service manager (docs/deployment.md), which needs no
Airflow. Safe at any time, and twice at once.
"""

from datetime import timedelta
from typing import Any

from airflow.sdk import dag, task

from tasks import settings


@dag(
    schedule="*/5 * * * *",
    catchup=False,
    max_active_runs=1,
    # A node that is down keeps its task waiting, and must not keep the others from their next round.
    dagrun_timeout=timedelta(minutes=4),
    is_paused_upon_creation=False,
    tags=["qwen"],
    doc_md=__doc__,
)
def gpu_reaper() -> None:
    """One task for each node."""
    deployment = settings.current()
    for node in deployment.nodes or (deployment.node,):
        queue = {"queue": node} if deployment.node_queues else {}

        @task(task_id=f"reap_{node}", doc_md=f"What nobody should hold any more on {node}.", **queue)
        def reap_node() -> dict[str, Any]:
            """Reap on the node of the queue."""
            from airflow.sdk import get_current_context
            from pipeline_tasks import answer

            from tasks import settings
            from tasks.errors import StageError
            from tasks.reap import as_facts, reap

            try:
                return as_facts(reap(settings.current()))
            except StageError as error:
                answer(error, get_current_context())

        reap_node()


gpu_reaper()
