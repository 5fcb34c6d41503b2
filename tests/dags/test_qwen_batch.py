"""The DAG has the shape that recovery stands on. Parsed by Airflow's own bag, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.spec.params import fields
from tasks.stages import STAGES

REPOSITORY = Path(__file__).resolve().parents[2]

DESCRIBE = """
import json, sys
sys.path[:0] = sys.argv[1:3]
from airflow.dag_processing.dagbag import BundleDagBag
bag = BundleDagBag(dag_folder=sys.argv[2], bundle_path=sys.argv[2], bundle_name="dags")
dag = bag.dags.get("qwen_batch")
from types import SimpleNamespace
from airflow.serialization.serialized_objects import DagSerialization
read_back = DagSerialization.from_dict(DagSerialization.to_dict(dag))
print(json.dumps({
    "errors": bag.import_errors,
    "params": {name: dag.params[name] for name in dag.params},
    "heavy": sorted({"torch", "vllm", "pyspark", "transformers"} & set(sys.modules)),
    "tasks": {
        task.task_id: {
            "upstream": sorted(task.upstream_task_ids),
            "setup": task.is_setup,
            "teardown": task.is_teardown,
            "fails_run": task.on_failure_fail_dagrun,
            "kind": type(task).__mro__[1].__name__,
            "doc": task.doc_md,
            "links": [one.name for one in read_back.get_task(task.task_id).operator_extra_links],
            "leads_to": [
                one.get_link(task, ti_key=SimpleNamespace(run_id="manual__2026-01-02T00:00:00+00:00"))
                for one in task.operator_extra_links
            ],
        }
        for task in dag.tasks
    },
}))
"""


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path_factory.mktemp("airflow")),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR",
    }
    said = subprocess.run(
        [sys.executable, "-c", DESCRIBE, REPOSITORY / "plugins", REPOSITORY / "dags"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout.splitlines()[-1])


def test_it_imports_and_pulls_in_nothing_heavy(described):
    assert described["errors"] == {}
    assert described["heavy"] == []


def test_every_stage_is_a_task_with_its_text(described):
    assert set(described["tasks"]) == {"freeze", "judge", *STAGES}
    for name, stage in STAGES.items():
        assert described["tasks"][name]["doc"] == stage.says


def test_the_form_has_a_param_for_every_field_of_the_spec(described):
    assert described["params"] == {name: value for name, (value, _) in fields().items()}


def test_no_device_is_taken_before_weights_and_rows_are_known_to_be_good(described):
    assert {"convert", "prepare"} <= set(described["tasks"]["provision"]["upstream"])


def test_what_gives_back_is_a_teardown_of_the_first_task_so_that_it_runs_whatever_fails(described):
    for name in ("stop", "restore", "judge"):
        assert described["tasks"][name]["teardown"]
        assert "freeze" in described["tasks"][name]["upstream"]
    assert described["tasks"]["freeze"]["setup"]


def test_a_failed_run_stays_failed(described):
    assert described["tasks"]["judge"]["fails_run"]
    assert {"publish", "restore"} <= set(described["tasks"]["judge"]["upstream"])


def test_clearing_the_run_brings_devices_and_workers_back_with_it(described):
    assert described["tasks"]["provision"]["setup"]
    assert described["tasks"]["start"]["setup"]


def test_the_batch_is_submitted_by_the_providers_operator(described):
    assert described["tasks"]["run"]["kind"] == "SparkSubmitOperator"


def test_tasks_that_start_or_use_workers_link_to_their_logs(described):
    links = {name: task["links"] for name, task in described["tasks"].items() if task["links"]}
    assert links == {name: ["Workers and their logs"] for name in ("start", "run", "stop")}
    leads_to = described["tasks"]["run"]["leads_to"]
    assert leads_to == ["/qwen-pipeline-workers/manual__2026-01-02T00%3A00%3A00%2B00%3A00"]
