"""Airflow's cluster policy: with a queue for each node, a task that acts on a node goes to that node's queue.

Airflow finds this file in a folder on PYTHONPATH (docs/nightly.md). A nightly DAG knows its node when it is read; a run
that is started from the form or over REST says it in its conf, and without that its DAG's Param does.
"""

from typing import Any

_OURS = "qwen"
"""The tag of this project's DAGs: another DAG may have a task `start` too."""


def task_instance_mutation_hook(task_instance: Any, dag_run: Any = None) -> None:
    """Called for every task of a new run: by the scheduler, and by the API server for one started by hand."""
    from tasks import settings
    from tasks.errors import InputError
    from tasks.stage_list import ON_THE_NODE

    if dag_run is None or task_instance.task_id not in ON_THE_NODE:
        return
    dag = getattr(getattr(task_instance, "task", None), "dag", None)
    if dag is not None and _OURS not in dag.tags:
        return
    node = (dag_run.conf or {}).get("node") or (dag.params.get("node") if dag is not None else None)
    try:
        queue = settings.current().queue_of(node) if node else None
    except InputError:
        # Left where somebody reads it: the task that starts the run says what is wrong.
        return
    if queue:
        task_instance.queue = queue
