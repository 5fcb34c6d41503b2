"""A company's day with the real scheduler: turns, quotas, halves of a node, a pool for people, a deadline.

All of it takes ten minutes on two cores, so it runs only with QWEN_TEST_EVERYTHING. What each part stands on has
short tests of its own: tests/ledger (turns, quotas), tests/serving/test_keep.py, tests/cli/test_outlook.py, tests/dags.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.company import NIGHTLY, NODE, ROWS_OF_A_NIGHT, SPARK_HISTORY, Company, Turn
from tests.chaos.world import DAG, ROWS
from tests.runs import wait_until

pytestmark = [pytest.mark.everything, pytest.mark.timeout(3600)]

_NIGHTS = 2
_DONE_AGAIN_S = 45.0
_TOO_MANY = 4000
"""Rows for three minutes: one of the stand-ins answers 16 a second."""


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    """See tests/chaos/company.py."""
    made = Company(Path(tmp_path_factory.mktemp("company")))
    try:
        made.start()
        yield made
    finally:
        made.end()


def turn_of(company: Company, run_id: str) -> Turn:
    (found,) = [turn for turn in company.turns() if turn.run_id == run_id]
    return found


def test_half_of_the_gpus_for_one_run_and_half_for_another_at_once(company: Company) -> None:
    with company.api() as api:
        for tenant in ("red", "green"):
            api.trigger(DAG, company.ask(tenant, 1, f"half-{tenant}", ROWS), run_id=f"half-{tenant}")
    for tenant in ("red", "green"):
        assert company.wait_for(DAG, f"half-{tenant}", 1200) == "success"
    red, green = turn_of(company, "half-red"), turn_of(company, "half-green")
    assert red.overlaps(green)
    assert len(red.devices) == len(green.devices) == 1
    assert red.devices != green.devices
    assert company.left() == []


def test_what_acts_on_the_node_went_to_its_queue(company: Company) -> None:
    queues = company.queues(DAG, "half-red")
    on_the_node = {"freeze", "preflight", "download", "convert", "provision", "start", "stop", "restore"}
    assert {task for task, queue in queues.items() if queue == NODE} == on_the_node


def test_a_run_whose_everything_is_done_is_quick_and_touches_no_gpu(company: Company) -> None:
    before = company.turns()
    with company.api() as api:
        spec = company.spec_of(DAG, "half-red")
        api.trigger(DAG, spec, run_id="half-red-again")
        assert company.wait_for(DAG, "half-red-again", 600) == "success"
        run = api.dag_run(DAG, "half-red-again")
    assert run.start is not None
    assert run.end is not None
    print(f"a run whose everything is done: {(run.end - run.start).total_seconds():.1f} s")
    assert company.turns() == before
    assert company.rows("select 1 from ledger.pool where run_id = 'half-red-again'") == []
    assert (run.end - run.start).total_seconds() < _DONE_AGAIN_S


def test_a_release_is_announced_as_an_asset(company: Company) -> None:
    with company.api() as api:
        spec = {name: company.spec_for("red", 1)[name] for name in ("tenant", "model", "convert", "node")}
        api.trigger("qwen_release", spec, run_id="release")
        assert company.wait_for("qwen_release", "release", 600) == "success"
        (event,) = [one for one in api.asset_events() if one["source_run_id"] == "release"]
        made = api.xcom("qwen_release", "release", "convert")["facts"]
    assert event["extra"]["release_id"] == made["release_id"]
    queues = company.queues("qwen_release", "release")
    assert {task for task, queue in queues.items() if queue == NODE} == {
        "freeze",
        "download",
        "convert",
    }


def test_people_query_a_pool_until_somebody_stops_it(company: Company, tmp_path: Path) -> None:
    name = "qwen_pool.pool"
    with company.api() as api:
        api.trigger("qwen_pool", {**company.spec_for("red", 1), "until": "2h"}, run_id="pool")
        wait_until(
            lambda: _state(company, "qwen_pool", "pool", "keep") == "up_for_reschedule", deadline_s=900
        )
        page = api.page((api.links("qwen_pool", "pool", "keep"))["Workers and their logs"] or "").text
        xcoms = json.dumps([api.xcom("qwen_pool", "pool", task) for task in ("freeze", "start", "keep")])
    key_file = tmp_path / "key"
    said = json.loads(company.cli("endpoints", "--run", name, "--key-file", str(key_file), "--json"))
    key = key_file.read_text()
    (endpoint,) = said["endpoints"]
    assert endpoint["url"] in page
    assert key not in page + xcoms
    assert _ask(endpoint["url"], said["model"], key_file)
    logs = (company.airflow.logs / "tasks").rglob("*.log")
    assert not [log for log in logs if key in log.read_text()]

    with company.api() as api:
        api.pass_task("qwen_pool", "pool", "keep")
    assert company.wait_for("qwen_pool", "pool") == "success"
    assert company.left() == []


def test_a_pool_ends_by_itself_when_its_time_is_up(company: Company) -> None:
    with company.api() as api:
        api.trigger("qwen_pool", {**company.spec_for("red", 1), "until": "3m"}, run_id="short")
    assert company.wait_for("qwen_pool", "short", 1200) == "success"
    assert turn_of(company, "qwen_pool.short").released_at is not None
    assert company.left() == []


def test_who_is_late_is_spoken_of_and_what_is_there_is_published_in_time(company: Company) -> None:
    limits = {"deadline": "6m", "warn": "4m", "wind_down": "3m", "partial": True}
    spec = company.ask("red", 1, "late", _TOO_MANY, limits=limits)
    with company.api() as api:
        api.trigger(DAG, spec, run_id="late")
        # A task shows its links a moment after it is running.
        wait_until(lambda: (api.links(DAG, "late", "run"))["Spark UI"], deadline_s=600)
        spark = (api.links(DAG, "late", "run"))["Spark UI"] or ""
        assert api.page(spark).headers["location"] == SPARK_HISTORY
        assert company.wait_for(DAG, "late", 1200) == "success"
        published = api.xcom(DAG, "late", "publish")["facts"]
        output = (api.links(DAG, "late", "publish"))["Output"] or ""
        assert published["version"] in api.page(output).text
        report = api.page((api.links(DAG, "late", "judge"))["Report"] or "").text
    assert 0 < published["answered"] < _TOO_MANY
    assert f"{published['answered']:,}" in report
    (told,) = [line for line in company.told.read_text().splitlines() if " late " in line]
    assert f"of {_TOO_MANY:,} rows are finished" in told
    assert "what is there then is published (limits.partial)" in told


def test_tenants_take_turns_on_one_node_though_new_runs_start_every_minute(company: Company) -> None:
    company.write_nights()
    nights = [f"qwen_nightly_{name}" for name in NIGHTLY]
    known = {turn.run_id for turn in company.turns()}

    def turns() -> list[Turn]:
        return [turn for turn in company.turns() if turn.run_id not in known]

    with company.api() as api:
        for dag in nights:
            api.unpause(dag)
        wait_until(turns, deadline_s=900)
        api.trigger(DAG, company.ask("green", "all", "by-hand", ROWS), run_id="by-hand")
    deadline = time.monotonic() + 2400
    while min(len(company.published_nights(name)) for name in NIGHTLY) < _NIGHTS:
        assert time.monotonic() < deadline, {name: company.published_nights(name) for name in NIGHTLY}
        time.sleep(2.0)
    assert company.wait_for(DAG, "by-hand", 1200) == "success"

    seen = turns()
    for turn in seen:
        waited = (turn.taken_at - turn.asked_at).total_seconds()
        print(f"{turn.run_id:<60} {turn.tenant:<6} {len(turn.devices)} GPU, waited {waited:.0f} s")
    for one in seen:
        for other in seen:
            if one is not other and one.overlaps(other):
                assert not set(one.devices) & set(other.devices), (one, other)
                assert (one.tenant, other.tenant) != ("blue", "blue"), "a quota of one device"
            # Who is not held back by a quota is passed by nobody who came later.
            if one.tenant != "blue" and one.asked_at < other.asked_at:
                assert one.taken_at < other.taken_at, (one, other)
    for name in NIGHTLY:
        stamps = company.published_nights(name)
        assert len(stamps) == len(set(stamps)) >= _NIGHTS
        for stamp in stamps:
            ids = company.published_ids(name, stamp)
            assert len(ids) == ROWS_OF_A_NIGHT
            assert all(one.startswith(f"{name}-{stamp}-") for one in ids)


def _state(company: Company, dag_id: str, run_id: str, task_id: str) -> str | None:
    with company.api() as api:
        states = {one.task_id: one.state for one in api.task_instances(dag_id, run_id)}
    return states.get(task_id)


def _ask(url: str, model: str, key_file: Path) -> str:
    """As docs/pool.md says, without the client of OpenAI's."""
    code = (
        "import sys, httpx, pathlib; url, model, key = sys.argv[1:]\n"
        "answer = httpx.post(url + '/chat/completions', timeout=60, "
        "headers={'Authorization': 'Bearer ' + pathlib.Path(key).read_text()}, "
        "json={'model': model, 'messages': [{'role': 'user', 'content': 'Hello'}]})\n"
        "print(answer.raise_for_status().json()['choices'][0]['message']['content'])"
    )
    command = [sys.executable, "-c", code, url, model, str(key_file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
