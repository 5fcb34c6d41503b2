"""Airflow's cluster policy: with a queue for each node, a task that acts on a node goes to that node's queue.

Airflow finds this file in a folder on PYTHONPATH (docs/dgx.md). A nightly DAG knows its node when it is read; a run
that is started from the form or over REST says it in its conf.
"""

from typing import Any


def task_instance_mutation_hook(task_instance: Any, dag_run: Any = None) -> None:
    """Called by the scheduler for every task of a new run."""
    from tasks import settings
    from tasks.stages import STAGES

    if dag_run is None or not settings.current().node_queues:
        return
    stage, node = STAGES.get(task_instance.task_id), (dag_run.conf or {}).get("node")
    if node and stage is not None and stage.on_the_node:
        task_instance.queue = node
