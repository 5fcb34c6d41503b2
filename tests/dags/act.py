"""Does what tasks of dags/ do, with stand-ins for Airflow's services and the hub; a process of its own: PLUGINS DAGS.

Reads {ledger, dag, task, run, conf, states, logical_date, cleared, waited_h} as a line of JSON, and says as another
what came of it. `cleared` is how often the run was; with `waited_h`, the task is a stage that finds what it needs held
by another run, and has waited so long.
"""

import json
import os
import sys
from datetime import UTC, datetime, timedelta
from importlib import import_module
from types import SimpleNamespace

sys.path[:0] = sys.argv[1:3]

# Named here alone: the tests' own processes import no Airflow.
BundleDagBag = import_module("airflow.dag_processing.dagbag").BundleDagBag
process_params = import_module("airflow.sdk.definitions.param").process_params
pipeline_tasks = import_module("pipeline_tasks")
settings = import_module("tasks.settings")
import_module("tasks.weights.pin").pin = lambda spec, settings: {"commit": "c", "release_id": "r"}
# How long a ledger that is away is waited for.
import_module("tasks.ledger").Ledger.__init__.__defaults__ = (0.1,)


def held(*arguments, **more):
    raise import_module("tasks.errors").Busy("held by another run")


import_module("tasks.stages").execute = held


def came_of(bag, asked):
    os.environ["QWEN_PIPELINE_LEDGER_URL"] = asked["ledger"]
    settings.current.cache_clear()
    dag = bag.dags[asked["dag"]]
    task = dag.get_task(asked["task"])
    at = datetime.fromisoformat(asked.get("logical_date", "2026-03-09T00:30:00+00:00")).astimezone(UTC)
    run = SimpleNamespace(
        dag_id=asked["dag"],
        run_id=asked["run"],
        conf=asked.get("conf", {}),
        logical_date=at,
        run_after=at,
        clear_number=asked.get("cleared", 0),
    )
    instance = SimpleNamespace(
        dag_id=run.dag_id,
        run_id=run.run_id,
        task_id=task.task_id,
        xcom_push=lambda **value: None,
        get_first_reschedule_date=lambda context: datetime.now(UTC) - timedelta(hours=asked["waited_h"]),
        get_task_states=lambda dag_id, run_ids: {run.run_id: asked["states"]},
    )
    params = process_params(dag, task, run.conf, suppress_exception=False)
    context = {"dag_run": run, "dag": dag, "params": params, "ti": instance}
    pipeline_tasks.get_current_context = lambda: context
    try:
        return {"returned": task.python_callable()}
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error)}


bag = BundleDagBag(dag_folder=sys.argv[2], bundle_path=sys.argv[2], bundle_name="dags")
for line in sys.stdin:
    print(f"\ncame of it: {json.dumps(came_of(bag, json.loads(line)))}", flush=True)
