"""Over REST as documented, one batch asked for twice at once, what services show and hide, and a cell of the matrix
(`make chaos` runs all)."""

import ast
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from demo.airflow_services import ADMIN, SERVICES
from tasks.errors import InputError
from tasks.node import processes
from tasks.settings import REPOSITORY
from tests.chaos.cell import run_cell, settled
from tests.chaos.events import EVENTS
from tests.chaos.world import DAG, ROWS, World

pytestmark = pytest.mark.timeout(900)

CELLS = [
    ("run", "task killed -9"),
    pytest.param("start", "run marked failed", marks=pytest.mark.everything),
]
BY_NAME = {event.name: event for event in EVENTS}

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the documented lines need curl")


def documented_lines() -> str:
    (lines,) = re.findall(r"```sh\n(.*?)```", (REPOSITORY / "docs" / "rest.md").read_text(), re.DOTALL)
    return str(lines)


@needs_curl
def test_the_documented_lines_run_a_batch_while_the_same_batch_is_asked_for_a_second_time(
    world: World, tmp_path: Path
) -> None:
    batch = world.new_batch("rest")
    (tmp_path / "spec.json").write_text(json.dumps(world.spec(batch)))
    with world.api() as api:
        second = api.trigger(DAG, world.spec(batch)).run_id
    said = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", documented_lines()],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "AIRFLOW": world.airflow.url,
            "AIRFLOW_USER": ADMIN,
            "AIRFLOW_PASSWORD": world.airflow.password,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    facts = ast.literal_eval(said.stdout)["facts"]
    assert (facts["answered"], facts["failed"]) == (ROWS, 0)
    assert settled(world, DAG, second) == "success"
    counted = world.counted(batch)
    assert counted is not None
    assert counted.holds
    assert world.generated_twice(batch) == 0
    assert world.left() == []


def test_a_conf_that_does_not_fit_is_refused_with_its_field(world: World) -> None:
    spec = world.spec(world.new_batch("refused"))
    with world.api() as api, pytest.raises(InputError) as refused:
        api.trigger(DAG, {**spec, "batch": {**spec["batch"], "sampling": {"max_tokens": -1}}})
    assert "400" in str(refused.value)
    assert "max_tokens" in str(refused.value)


def test_no_environment_of_a_service_holds_a_secret(world: World) -> None:
    secrets = [world.airflow.password, world.cluster.url("airflow").split("@")[0].rpartition(":")[2]]
    environments = [_environment(process.pid) for process in world.children.living()]
    assert sum(bool(environment) for environment in environments) > len(SERVICES)
    assert not any(secret in environment for secret in secrets for environment in environments)
    assert world.airflow.password not in (world.airflow.logs / "api-server.log").read_text()


def test_every_process_is_found_by_its_marks_although_it_renames_itself(world: World) -> None:
    services = [world.children.find(f"airflow-{service}") for service in SERVICES]
    groups = {os.getsid(service.pid) for service in services if service is not None}
    assert len(groups) == len(SERVICES)
    theirs = {
        int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _session(int(entry)) in groups
    }
    found = {process.pid for process in world.children.living()}
    # The services start and end short-lived processes all the time.
    assert {pid for pid in theirs - found if processes.identify(pid) is not None} == set()


def test_starting_what_runs_keeps_it(world: World) -> None:
    before = [world.children.find(f"airflow-{service}") for service in SERVICES]
    world.airflow.start()
    assert [world.children.find(f"airflow-{service}") for service in SERVICES] == before


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("/qwen-pipeline/", "Pipeline"),
        ("/qwen-pipeline-workers/nobodys", "no worker yet"),
        ("/qwen-pipeline-runs/nobodys/report", "nobodys"),
        ("/qwen-pipeline-runs/nobodys/output", "nobodys"),
        ("/qwen-pipeline-runs/nobodys/spark", "No Spark application"),
    ],
)
def test_pages_are_for_those_who_are_logged_in(world: World, place: str, says: str) -> None:
    with world.api() as api:
        shown = api.page(place)
    assert (shown.status_code, says in shown.text) == (200, True), shown.text
    assert httpx.get(f"{world.airflow.url}{place}", trust_env=False).status_code == 401


@pytest.mark.parametrize(("stage", "event"), CELLS)
def test_nothing_is_lost_doubled_or_leaked(world: World, stage: str, event: str) -> None:
    result = run_cell(world, stage, BY_NAME[event], seed=0)
    assert result.wrong == (), result


def _environment(pid: int) -> str:
    """Empty when it has ended: backends of PostgreSQL come and go."""
    try:
        return Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
