"""The DAG has the shape that recovery stands on."""

import pytest

from tasks.spec.params import fields
from tasks.stage_list import STAGES


@pytest.fixture
def described(read_by_airflow):
    return read_by_airflow["dags"]["qwen_batch"]


def test_all_files_import_and_pull_in_nothing_heavy(read_by_airflow):
    assert read_by_airflow["errors"] == {}
    assert read_by_airflow["heavy"] == []


def test_every_stage_is_a_task_with_its_text(described):
    assert set(described["tasks"]) == {"freeze", "judge", *STAGES}
    for name, stage in STAGES.items():
        assert described["tasks"][name]["doc"] == stage.says


def test_the_form_has_a_param_for_every_field_of_the_spec(described):
    assert described["params"] == {name: value for name, (value, _) in fields().items()}


def test_no_device_is_taken_before_weights_and_rows_are_known_to_be_good(described):
    assert {"convert", "prepare"} <= set(described["tasks"]["provision"]["upstream"])


def test_what_gives_back_is_a_teardown_of_the_first_task_so_that_it_runs_whatever_fails(described):
    for name in ("stop", "restore"):
        assert described["tasks"][name]["teardown"]
        assert "freeze" in described["tasks"][name]["upstream"]
    assert described["tasks"]["freeze"]["setup"]


def test_a_failed_run_stays_failed(described):
    assert described["tasks"]["judge"]["fails_run"]
    assert {"publish", "restore"} <= set(described["tasks"]["judge"]["upstream"])


def test_a_task_that_is_cleared_with_what_follows_brings_all_that_ends_a_run_with_it(described):
    assert {"freeze", "provision", "start", "stop", "restore", "judge"} <= set(described["cleared_with_run"])


def test_clearing_the_run_brings_devices_and_workers_back_with_it(described):
    assert described["tasks"]["provision"]["setup"]
    assert described["tasks"]["start"]["setup"]


def test_the_batch_is_submitted_by_the_providers_operator(described):
    assert described["tasks"]["run"]["kind"] == "SparkSubmitOperator"


def test_tasks_link_to_what_a_person_wants_to_see_of_them(described):
    links = {name: task["links"] for name, task in described["tasks"].items() if task["links"]}
    assert links == {
        "freeze": ["Report"],
        "start": ["Workers and their logs"],
        "run": ["Workers and their logs", "Spark UI"],
        "stop": ["Workers and their logs"],
        "publish": ["Output", "Report"],
        "judge": ["Report"],
    }
    workers, spark = described["tasks"]["run"]["leads_to"]
    assert workers == "/qwen-pipeline-workers/manual__2026-01-02T00%3A00%3A00%2B00%3A00"
    assert spark == "", "Spark has no page of its own unless the deployment says so"
    output = described["tasks"]["publish"]["leads_to"][0]
    assert output == "/qwen-pipeline-runs/manual__2026-01-02T00%3A00%3A00%2B00%3A00/output"


def test_airflow_has_the_schema_of_the_spec_for_every_field_of_the_form(described):
    assert described["schemas"] == {name: schema for name, (_, schema) in fields().items()}


def test_whoever_wants_to_know_is_warned_before_the_deadline(described):
    assert described["warns_at"]["default"] == "2026-01-02T05:00:00+00:00"  # an hour before the 6 of the spec
    assert described["warns_at"]["conf"] == "2026-01-02T03:00:00+00:00"


def test_the_clock_of_its_deadline_is_airflows_own(described):
    assert described["warns_at"]["on the wall"] == "2026-01-02T04:00:00+00:00"  # an hour before 7 in Helsinki


def test_nobody_is_warned_of_a_run_that_has_ended_before_it_began(read_by_airflow):
    assert read_by_airflow["spoken_of"] == {
        "queued": True,
        "running": True,
        "success": False,
        "failed": False,
    }
