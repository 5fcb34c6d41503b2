"""The DAG of a release alone: parsed by Airflow's own bag, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.errors import InputError
from tasks.spec.params import fields
from tasks.spec.release import ReleaseSpec, parse_release

REPOSITORY = Path(__file__).resolve().parents[2]

DESCRIBE = """
import json, sys
sys.path[:0] = sys.argv[1:3]
from airflow.dag_processing.dagbag import BundleDagBag
bag = BundleDagBag(dag_folder=sys.argv[2], bundle_path=sys.argv[2], bundle_name="dags")
dag = bag.dags["qwen_release"]
print(json.dumps({
    "errors": bag.import_errors,
    "params": {name: dag.params[name] for name in dag.params},
    "tasks": {
        task.task_id: {
            "upstream": sorted(task.upstream_task_ids),
            "teardown": task.is_teardown,
            "outlets": [asset.name for asset in task.outlets],
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


def test_it_imports_and_does_the_weights_alone(described):
    assert described["errors"] == {}
    assert set(described["tasks"]) == {"freeze_release", "download", "convert", "announce", "judge"}
    assert described["tasks"]["convert"]["upstream"] == ["download"]


def test_the_release_is_announced_as_an_asset_only_after_it_was_made(described):
    announce = described["tasks"]["announce"]
    assert announce["outlets"] == ["qwen_release"]
    assert announce["upstream"] == ["convert"]


def test_a_failed_run_stays_failed(described):
    judge = described["tasks"]["judge"]
    assert judge["teardown"]
    assert "announce" in judge["upstream"]


def test_the_form_asks_for_the_weights_and_nothing_else(described):
    assert described["params"] == {name: value for name, (value, _) in fields(ReleaseSpec).items()}
    assert set(described["params"]) == {"version", "tenant", "model", "convert", "node"}


def test_its_spec_is_refused_like_a_run_spec():
    spec = parse_release({"model": {"repo": "Qwen/Q"}, "convert": {"scheme": "fp8"}})
    assert (spec.model.repo, spec.convert.scheme) == ("Qwen/Q", "fp8")
    with pytest.raises(InputError, match=r"\n  convert\.scheem"):
        parse_release({"model": {"repo": "Qwen/Q"}, "convert": {"scheem": "fp8"}})
