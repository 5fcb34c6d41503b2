"""Each file of the nightly folder is a DAG like qwen_batch, with its own hour, day and queue."""

import pytest


@pytest.fixture
def prod(read_by_airflow):
    return read_by_airflow["dags"]["qwen_nightly_prod"]


def test_it_runs_when_and_where_the_file_says(prod):
    assert (prod["cron"], prod["timezone"], prod["catchup"]) == ("30 0 * * *", "Europe/Berlin", False)
    assert {prod["tasks"][name]["queue"] for name in ("freeze", "provision")} == {"dgx-07"}
    assert prod["tasks"]["prepare"]["queue"] == "default"


def test_one_that_is_first_switched_on_by_day_waits_for_the_night(prod):
    assert prod["next_run"]["switched on by day"] == "2026-03-09T23:30:00+00:00"
    assert prod["next_run"]["read again just after"] == "2026-03-08T23:30:00+00:00"


def test_the_last_of_the_nights_that_were_missed_is_run_at_once(prod):
    assert prod["next_run"]["after a pause"] == "2026-03-08T23:30:00+00:00"


def test_with_catchup_every_night_since_its_start_is_run(read_by_airflow):
    made_up = read_by_airflow["dags"]["qwen_nightly_made_up"]["next_run"]
    assert made_up["switched on by day"] == "2026-01-31T23:30:00+00:00"  # the 1st on the wall
    assert made_up["after a pause"] == "2026-03-02T23:30:00+00:00"


def test_its_params_are_the_files_spec_with_open_dates(prod):
    assert prod["params"]["tenant"] == "prod"
    assert prod["params"]["batch"]["input"] == "/prompts/{{ ds }}/"


@pytest.mark.parametrize("name", ["prod", "never"])
def test_its_tasks_are_those_of_qwen_batch_even_when_its_file_is_spoilt_while_it_runs(read_by_airflow, name):
    def shape(dag):
        return {
            name: (task["upstream"], task["setup"], task["teardown"]) for name, task in dag["tasks"].items()
        }

    dags = read_by_airflow["dags"]
    assert shape(dags[f"qwen_nightly_{name}"]) == shape(dags["qwen_batch"])


def test_a_file_that_cannot_be_scheduled_is_a_dag_that_says_why(read_by_airflow):
    never = read_by_airflow["dags"]["qwen_nightly_never"]
    assert never["cron"] is None
    assert "schedule.cron: '99 0 * * *' is no cron expression" in never["doc"]


def test_a_file_for_a_node_that_nobody_serves_is_refused(read_by_airflow):
    elsewhere = read_by_airflow["dags"]["qwen_nightly_elsewhere"]
    assert elsewhere["cron"] is None
    assert "node: 'dgx-99' is none of this deployment's (dgx-07, dgx-08" in elsewhere["doc"]


def test_a_night_that_never_comes_is_refused(read_by_airflow):
    leap = read_by_airflow["dags"]["qwen_nightly_leap"]
    assert leap["cron"] is None
    assert "schedule.cron: '0 0 31 2 *' is no cron expression" in leap["doc"]


def test_a_file_of_which_airflow_makes_no_dag_is_refused_alone(read_by_airflow):
    assert "Airflow makes no DAG of it: OverflowError" in read_by_airflow["dags"]["qwen_nightly_early"]["doc"]


def test_who_wants_to_know_of_failures_is_told_of_those_alone(prod):
    assert prod["told_of_failure"] == ["close_what_failed", "SmtpNotifier"]
    assert prod["told_of_success"] == []


def test_the_reaper_runs_on_every_node(read_by_airflow):
    reaper = read_by_airflow["dags"]["gpu_reaper"]
    assert {task["queue"] for task in reaper["tasks"].values()} == {"dgx-07", "dgx-08"}


def test_what_people_start_and_the_reaper_are_switched_on_and_nights_wait_for_somebody_to_do_so(
    read_by_airflow,
):
    switched_on = {name for name, dag in read_by_airflow["dags"].items() if dag["paused"] is False}
    assert switched_on == {"gpu_reaper", "qwen_batch", "qwen_pool", "qwen_release"}


def test_a_node_that_is_down_keeps_no_other_from_being_reaped(read_by_airflow):
    reaper = read_by_airflow["dags"]["gpu_reaper"]
    assert (reaper["cron"], reaper["max_active_runs"]) == ("*/5 * * * *", 1)
    assert reaper["timeout_s"] < 5 * 60


def test_a_reaper_that_fails_all_night_wakes_nobody_every_five_minutes(read_by_airflow):
    assert read_by_airflow["dags"]["gpu_reaper"]["told_of_failure"] == []


def test_its_deadline_is_on_the_wall_where_its_schedule_is(prod):
    assert prod["warns_at"]["default"] == "2026-01-02T05:00:00+00:00"  # an hour before 7 in Berlin
