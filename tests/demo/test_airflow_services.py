"""What services do with DAGs of all kinds, and after a kill. One start of them serves all tests of this file: it takes
a minute of a core, so they are among `everything`; tests/chaos looks at services that it needs anyway.
"""

import configparser
import os
import signal
import socket
import time
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from demo.airflow_api import AirflowApi, DagRun
from demo.airflow_services import Airflow
from demo.children import Children
from demo.postgres import Cluster
from tasks.errors import InputError, StageFailed

GOOD = """
import configparser
import os
from pathlib import Path
from airflow.sdk import Param, dag, task

@dag(schedule=None, params={"number": Param(1, type="integer", minimum=1)})
def good():
    @task
    def look(params=None):
        return {"number": params["number"], "environment": dict(os.environ), "folder": os.getcwd()}

    @task
    def follow(seen):
        return seen["number"] + 1

    follow(look())

good()
"""

BROKEN = """
from airflow.sdk import dag
raise RuntimeError("this file cannot be imported")
"""

RUN_DEADLINE_S = 120.0

pytestmark = pytest.mark.everything


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    made = Children(tmp_path_factory.mktemp("children"), f"test-airflow-{token_hex(4)}")
    yield made
    made.end_all(grace_s=0)


@pytest.fixture(scope="module")
def airflow(
    tmp_path_factory: pytest.TempPathFactory, postgres: Cluster, children: Children
) -> Iterator[Airflow]:
    home = tmp_path_factory.mktemp("airflow")
    (home / "dags").mkdir()
    (home / "plugins").mkdir()
    (home / "dags" / "good.py").write_text(GOOD)
    (home / "dags" / "broken.py").write_text(BROKEN)
    made = Airflow(
        home / "home",
        children,
        database_url=postgres.url("airflow"),
        dags=home / "dags",
        plugins=home / "plugins",
        environment={"QWEN_PIPELINE_HOME": "/somewhere"},
    )
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def api(airflow: Airflow) -> Iterator[AirflowApi]:
    with airflow.api() as opened:
        opened.wait_for_dag("good", parsed_after=airflow.started_at)
        opened.unpause("good")
        yield opened


@pytest.fixture(scope="module")
def finished(api: AirflowApi) -> DagRun:
    api.trigger("good", {"number": 7}, run_id="first")
    deadline = time.monotonic() + RUN_DEADLINE_S
    while not (run := api.dag_run("good", "first")).finished:
        assert time.monotonic() < deadline, api.task_instances("good", "first")
        time.sleep(0.2)
    return run


@pytest.fixture(scope="module")
def seen(api: AirflowApi, finished: DagRun) -> dict[str, str]:
    """The environment of a task."""
    answer: dict[str, Any] = api.xcom("good", "first", "look")
    return dict(answer["environment"])


def test_a_run_started_over_rest_succeeds(api: AirflowApi, finished: DagRun) -> None:
    assert finished.state == "success"
    assert {task.task_id: task.state for task in api.task_instances("good", "first")} == {
        "look": "success",
        "follow": "success",
    }
    assert api.xcom("good", "first", "follow") == 8
    assert api.xcom("good", "first", "follow", "absent") is None


def test_a_task_sees_the_settings_of_the_pipeline_and_its_marks(
    seen: dict[str, str], children: Children
) -> None:
    assert seen["QWEN_PIPELINE_HOME"] == "/somewhere"
    assert seen["QWEN_PIPELINE_DEPLOYMENT"] == children.deployment
    assert seen["QWEN_PIPELINE_PART"] == "airflow-scheduler"


def test_no_environment_of_a_task_holds_a_secret(
    seen: dict[str, str], airflow: Airflow, postgres: Cluster
) -> None:
    secrets = [airflow.password, postgres.url("airflow").split("@")[0].rpartition(":")[2]]
    assert not any(secret in str(seen) for secret in secrets)


def test_the_transaction_of_a_killed_scheduler_ends_though_a_process_of_its_keeps_the_connection(
    airflow: Airflow,
) -> None:
    config = configparser.RawConfigParser()
    config.read(airflow.home / "airflow.cfg")
    with create_engine(config["database"]["sql_alchemy_conn"]).connect() as connection:
        setting = connection.scalar(text("show idle_in_transaction_session_timeout"))
    assert setting == "2min"


def test_a_value_that_does_not_fit_the_params_is_refused(api: AirflowApi) -> None:
    with pytest.raises(InputError, match="less than the minimum of 1"):
        api.trigger("good", {"number": 0})


def test_a_run_id_that_is_taken_is_refused(api: AirflowApi, finished: DagRun) -> None:
    with pytest.raises(InputError, match=r"there already.*first"):
        api.trigger("good", {"number": 1}, run_id="first")


def test_a_file_that_does_not_import_is_shown_with_its_traceback(airflow: Airflow, api: AirflowApi) -> None:
    with pytest.raises(StageFailed, match="this file cannot be imported"):
        api.wait_for_dag("broken", parsed_after=airflow.started_at)


def test_stop_leaves_nothing_even_of_a_scheduler_that_was_killed(
    airflow: Airflow, children: Children
) -> None:
    airflow.start()  # whatever test ran before
    scheduler = children.find("airflow-scheduler")
    assert scheduler is not None
    os.kill(scheduler.pid, signal.SIGKILL)
    port = int(airflow.url.rpartition(":")[2])
    airflow.stop()
    assert children.living() == []
    socket.create_server(("127.0.0.1", port)).close()
