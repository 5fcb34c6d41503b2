"""Airflow's cluster policy: what acts on a node goes to the node's queue, whichever DAG it is of."""

from importlib import util
from types import SimpleNamespace

import pytest

from tasks import settings
from tasks.settings import REPOSITORY
from tasks.stage_list import ON_THE_NODE


@pytest.fixture
def queue_of(monkeypatch):
    """The queue of a task after the policy; as Airflow loads it, without Airflow."""
    monkeypatch.setenv("QWEN_PIPELINE_NODE_QUEUES", "true")
    monkeypatch.setenv("QWEN_PIPELINE_NODES", '["dgx-01", "dgx-07"]')
    settings.current.cache_clear()
    place = REPOSITORY / "config" / "airflow_local_settings.py"
    spec = util.spec_from_file_location("airflow_local_settings", place)
    policy = util.module_from_spec(spec)
    spec.loader.exec_module(policy)

    def queue_of(task_id, conf, tags=("qwen",), node="dgx-01"):
        dag = SimpleNamespace(tags=set(tags), params={"node": node})
        instance = SimpleNamespace(task_id=task_id, queue="default", task=SimpleNamespace(dag=dag))
        policy.task_instance_mutation_hook(instance, dag_run=SimpleNamespace(conf=conf))
        return instance.queue

    yield queue_of
    settings.current.cache_clear()


@pytest.mark.parametrize("task_id", sorted(ON_THE_NODE))
def test_what_acts_on_a_node_goes_to_the_node_that_the_conf_names(queue_of, task_id):
    assert queue_of(task_id, {"node": "dgx-07"}) == "dgx-07"


def test_without_a_node_in_the_conf_it_is_that_of_the_form(queue_of):
    assert queue_of("convert", {}) == "dgx-01"
    assert queue_of("convert", None) == "dgx-01"


@pytest.mark.parametrize("task_id", ["prepare", "run", "reconcile", "publish", "judge", "announce"])
def test_what_does_not_act_on_it_may_run_anywhere(queue_of, task_id):
    assert queue_of(task_id, {"node": "dgx-07"}) == "default"


def test_what_freezes_a_run_reads_folders_and_releases_of_the_node():
    assert "freeze" in ON_THE_NODE


def test_nothing_waits_in_a_queue_that_nobody_serves(queue_of):
    assert queue_of("freeze", {"node": "dgx-99"}) == "default"


def test_a_task_of_somebody_elses_dag_is_left_alone(queue_of):
    assert queue_of("start", {"node": "dgx-07"}, tags=("billing",)) == "default"
