"""The DAG that keeps a pool for people, and the spec it takes."""

import pytest

from tasks.errors import InputError
from tasks.spec.params import fields
from tasks.spec.pool import PoolSpec, parse_pool

POOL = {"model": {"repo": "Qwen/Q"}, "layout": {"cpu": 1}}


@pytest.fixture
def described(read_by_airflow):
    return read_by_airflow["dags"]["qwen_pool"]


def test_its_tasks_are_those_of_a_batch_without_the_rows(described, read_by_airflow):
    batch = read_by_airflow["dags"]["qwen_batch"]["tasks"]
    assert set(described["tasks"]) == {*batch, "keep"} - {"prepare", "run", "reconcile", "publish"}
    assert described["tasks"]["keep"]["upstream"] == ["start"]


def test_workers_and_devices_are_given_back_whatever_happens_to_it(described):
    for name in ("stop", "restore"):
        assert described["tasks"][name]["teardown"]
        assert "freeze" in described["tasks"][name]["upstream"]
    assert described["tasks"]["judge"]["fails_run"]


def test_the_form_asks_when_it_ends_and_for_no_rows(described):
    assert described["params"] == {name: value for name, (value, _) in fields(PoolSpec).items()}
    assert set(described["params"]) >= {"until", "layout", "serving"}
    assert not {"batch", "limits"} & set(described["params"])


def test_the_page_with_its_endpoints_is_linked_from_the_task_that_keeps_it(described):
    assert described["tasks"]["keep"]["links"] == ["Workers and their logs"]
    (leads_to,) = described["tasks"]["keep"]["leads_to"]
    assert leads_to == "/qwen-pipeline-workers/qwen_pool.manual__2026-01-02T00%3A00%3A00%2B00%3A00"


def test_the_pool_ends_when_the_spec_says():
    assert parse_pool({**POOL, "until": "18:00"}).limits.deadline == "18:00"
    assert parse_pool(POOL).limits.deadline == "8h"
    assert parse_pool({**POOL, "until": None}).limits.deadline == "3650d"  # when somebody stops it
    assert parse_pool(POOL).batch.is_none


def test_its_spec_is_refused_like_a_run_spec():
    with pytest.raises(InputError, match=r"is not the spec of a pool:\n  until: "):
        parse_pool({**POOL, "until": "soon"})
    with pytest.raises(InputError, match="no such field"):
        parse_pool({**POOL, "untill": "18:00"})
    with pytest.raises(InputError, match=r"\n  limits: there is no such field"):
        parse_pool({**POOL, "limits": {"wait": "1h"}})
