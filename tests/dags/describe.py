"""Says, as JSON, what Airflow's own bag reads in dags/. Run in a process of its own: PLUGINS DAGS."""

import asyncio
import json
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from types import SimpleNamespace

sys.path[:0] = sys.argv[1:3]

# Named here alone: the tests' own processes import no Airflow.
BundleDagBag = import_module("airflow.dag_processing.dagbag").BundleDagBag

decode_deadline_alert = import_module("airflow.serialization.decoders").decode_deadline_alert
encode_deadline_alert = import_module("airflow.serialization.encoders").encode_deadline_alert
base = import_module("airflow.timetables.base")
pendulum = import_module("pendulum")
DagSerialization = import_module("airflow.serialization.serialized_objects").DagSerialization
RUN_ID = "manual__2026-01-02T00:00:00+00:00"


@cache
def read_back(dag):
    """As the UI has it, from the database."""
    return DagSerialization.from_dict(DagSerialization.to_dict(dag))


def warns_at(dag, conf):
    """When a run that starts at midnight is warned of, by the alert as Airflow's database keeps it."""
    for alert in dag.deadline or []:
        kept = decode_deadline_alert(json.loads(json.dumps(encode_deadline_alert(alert)))).reference
        return kept.inner_ref.moment(conf, datetime(2026, 1, 2, tzinfo=UTC)).isoformat()
    return None


def next_run(dag, now, last=None):
    """When Airflow's scheduler starts a run of `dag` next, as of `now`, `last` having been the last."""
    import_module("airflow.timetables.trigger").utcnow = lambda: datetime.fromisoformat(now)
    at = last and pendulum.parse(last)
    ran = last and base.DagRunInfo.interval(at, at)
    found = read_back(dag).next_dagrun_info(last_automated_run_info=ran)
    return found and found.run_after.isoformat()


def spoken_of(state):
    """Whether somebody is warned of a run of which the ledger knows nothing, while it is in that state."""
    said = []
    deadline_alert = import_module("deadline_alert")
    deadline_alert._how_it_stands = said.append
    asyncio.run(
        deadline_alert.warn({"dag_run": {"dag_id": "qwen_batch", "dag_run_id": RUN_ID, "state": state}})
    )
    return said != []


def called(callback):
    """The name of a function, or of a notifier's class."""
    return getattr(callback, "__name__", type(callback).__name__)


bag = BundleDagBag(dag_folder=sys.argv[2], bundle_path=sys.argv[2], bundle_name="dags")
print(
    json.dumps(
        {
            "spoken_of": {state: spoken_of(state) for state in ("queued", "running", "success", "failed")},
            "errors": bag.import_errors,
            "heavy": sorted({"torch", "vllm", "pyspark", "transformers", "fastapi"} & set(sys.modules)),
            "dags": {
                dag.dag_id: {
                    "params": {name: dag.params[name] for name in dag.params},
                    "schemas": {name: dag.params.get_param(name).schema for name in dag.params},
                    "warns_at": {
                        "default": warns_at(dag, {}),
                        "conf": warns_at(dag, {"limits": {"deadline": "6h", "warn": "3h"}}),
                        "on the wall": warns_at(dag, {"limits": {"deadline": "07:00", "warn": "1h"}}),
                    },
                    "next_run": {
                        "switched on by day": next_run(dag, "2026-03-09T14:00:00+00:00"),
                        "read again just after": next_run(dag, "2026-03-08T23:30:20+00:00"),
                        "after a pause": next_run(
                            dag, "2026-03-09T14:00:00+00:00", last="2026-03-01T23:30:00+00:00"
                        ),
                    },
                    "cron": getattr(dag.timetable, "expression", None),
                    "timezone": str(getattr(dag.timetable, "timezone", dag.timezone)),
                    "catchup": dag.catchup,
                    "timeout_s": dag.dagrun_timeout and dag.dagrun_timeout.total_seconds(),
                    "cleared_with_run": [
                        one.task_id
                        for one in read_back(dag)
                        .partial_subset(["run"], include_upstream=False, include_downstream=True)
                        .tasks
                    ],
                    "max_active_runs": dag.max_active_runs,
                    "paused": dag.is_paused_upon_creation,
                    "doc": dag.doc_md,
                    "told_of_failure": [called(one) for one in dag.on_failure_callback or []],
                    "told_of_success": [called(one) for one in dag.on_success_callback or []],
                    "tasks": {
                        task.task_id: {
                            "upstream": sorted(task.upstream_task_ids),
                            "setup": task.is_setup,
                            "teardown": task.is_teardown,
                            "fails_run": task.on_failure_fail_dagrun,
                            "kind": type(task).__mro__[1].__name__,
                            "queue": task.queue,
                            "retries": task.retries,
                            "outlets": [asset.name for asset in task.outlets],
                            "links": [
                                one.name for one in read_back(dag).get_task(task.task_id).operator_extra_links
                            ],
                            "leads_to": [
                                one.get_link(task, ti_key=SimpleNamespace(dag_id=dag.dag_id, run_id=RUN_ID))
                                for one in task.operator_extra_links
                            ],
                            "doc": task.doc_md,
                        }
                        for task in dag.tasks
                    },
                }
                for dag in bag.dags.values()
            },
        }
    )
)
