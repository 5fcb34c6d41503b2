"""The pool with a stand-in for vLLM: how it comes up, what it tells, and why it does not come up."""

import json
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tasks.errors import InputError, StageFailed
from tasks.serving import pools
from tests.serving.pool_world import World, get_text, status_of, wait_for


def test_start_brings_up_a_worker_for_each_slot_and_again_changes_nothing(world: World) -> None:
    result = world.execute("start")
    assert result.changed
    assert result.facts["workers"] == 2
    before = world.processes()
    again = world.execute("start")
    assert not again.changed
    assert "are ready" in again.message
    assert again.facts == result.facts
    assert world.processes() == before


def test_without_rows_to_do_no_model_is_loaded(world: World) -> None:
    world.succeed("run-1", "prepare", {"to_do": 0})
    result = world.execute("start")
    assert not result.changed
    assert "no row is left to do, so no model is loaded" in result.message
    assert result.facts["pool_id"] is None
    assert world.processes() == []


def test_the_registry_tells_only_who_has_the_key(world: World) -> None:
    world.configure(worker_environment={"STANDIN_BUSY": "1"})
    facts = world.execute("start").facts
    url = f"{facts['registry']}/v1/pool"
    assert status_of(url) == 401
    assert status_of(url, world.key("another pool")) == 401
    document = world.registry()
    assert (document["pool_id"], document["model"]) == (facts["pool_id"], facts["model"])
    assert [worker["worker_id"] for worker in document["workers"]] == ["worker-0", "worker-1"]
    for worker in wait_for("loads", lambda: _loaded(world)):
        assert (worker["state"], worker["running"], worker["waiting"]) == ("ready", 2, 1)


def _loaded(world: World) -> list[dict[str, object]]:
    workers: list[dict[str, object]] = world.registry()["workers"]
    return workers if all(worker["running"] for worker in workers) else []


def test_first_requests_are_reported_in_the_ledger(world: World) -> None:
    world.configure(prewarm_rounds=3)
    world.execute("start")
    for row in world.rows("select startup from pool_worker"):
        report = row["startup"]["first_requests"]
        assert len(report["rounds"]) >= 2
        assert report["rounds"][0]["requests"] == report["shapes"]["sequences"]
        assert row["startup"]["compile_cache"]["was_warm"] is False


def test_a_start_that_fails_with_a_warm_cache_drops_it_and_tries_again(world: World) -> None:
    from tasks.serving import compile_cache

    once = world.home / "once"
    once.write_text("EOFError: Ran out of input")
    cache = compile_cache.folder(world.settings, world.home / "release", "cpu")
    (cache / "triton").mkdir(parents=True)
    world.configure(worker_environment={"STANDIN_FAIL_ONCE": str(once)})
    world.execute("start")
    assert not (cache / "triton").exists()
    log = (world.settings.logs / "run-1" / "keeper.log").read_text()
    assert f"the compile cache {cache} is dropped" in log


def test_a_workers_log_is_read_through_the_registry_with_the_key_only(world: World) -> None:
    facts = world.execute("start").facts
    url = f"{facts['registry']}/v1/logs/worker-0?lines=5"
    assert status_of(url) == 401
    assert "this is a stand-in for vllm serve" in get_text(url, world.key())
    assert "ready" in get_text(f"{facts['registry']}/v1/logs/keeper", world.key())
    assert status_of(f"{facts['registry']}/v1/logs/..%2Fkeeper", world.key()) == 404


def test_a_bad_flag_is_the_users_error_and_leaves_nothing(world: World) -> None:
    says = "api_server.py: error: unrecognized arguments: --frobnicate"
    world.configure(worker_environment={"STANDIN_FAIL": says})
    with pytest.raises(InputError, match=r"(?s)vLLM refused a flag.*unrecognized arguments: --frobnicate"):
        world.execute("start")
    assert world.processes() == []
    assert pools.open_pool(world.ledger, "run-1") is None
    states = world.rows("select worker_id, attempt, state from pool_worker")
    assert {row["attempt"] for row in states} == {1}, "not tried again"
    assert "dead" in {row["state"] for row in states}


def test_a_vllm_that_misreads_the_release_serves_no_row(world: World) -> None:
    document = {"version": 1, "files": {}, "reading": {"tokens": [5, 6, 7], "nats": 2.0}}
    (world.home / "release" / "manifest.json").write_text(json.dumps(document))
    world.configure(worker_environment={"STANDIN_NATS": "11.5"})

    with pytest.raises(StageFailed, match=r"reads .* differently .* 11\.500 nats .* 2\.000 were measured"):
        world.execute("start")

    assert world.processes() == []
    assert {row["attempt"] for row in world.rows("select attempt from pool_worker")} == {1}, "not tried again"

    world.configure(worker_environment={"STANDIN_NATS": "2.1"})
    world.execute("start")
    (startup, *_) = (
        row["startup"] for row in world.rows("select startup from pool_worker where startup is not null")
    )
    assert startup["first_requests"]["reading"] == "2.100 nats a token, measured were 2.000"


def test_a_failure_that_can_pass_is_tried_again(world: World) -> None:
    once = world.home / "once"
    once.write_text("OSError: [Errno 98] address already in use")
    world.configure(worker_environment={"STANDIN_FAIL_ONCE": str(once)}, starts_at_once=1)
    world.execute("start")
    attempts = world.rows("select worker_id, attempt, lower(ports) as port, state from pool_worker")
    assert sorted(row["state"] for row in attempts) == ["dead", "ready", "ready"]
    assert len({row["port"] for row in attempts if row["worker_id"] == "worker-0"}) == 2, "another block"


def test_a_start_that_takes_too_long_fails_and_leaves_nothing(world: World) -> None:
    world.configure(worker_environment={"STANDIN_START_S": "60", "STANDIN_DEAF": "1"}, start_timeout_s=3)
    with pytest.raises(StageFailed, match=r"worker-\d was not ready after 3 s"):
        world.execute("start")
    assert world.processes() == []


def test_a_port_that_somebody_else_holds_is_passed_over(world: World) -> None:
    first = world.settings.port_range[0]
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # held by somebody already: as good
            other.bind(("127.0.0.1", first + 1))
            other.listen()
        world.execute("start")
        held = range(first, first + world.settings.ports_per_worker)
        urls = [worker["url"] for worker in world.registry()["workers"]]
        assert not any(int(url.rsplit(":", 1)[1]) in held for url in urls)


def test_the_key_and_our_secrets_are_nowhere_to_be_read(world: World) -> None:
    world.monkeypatch.setenv(
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "postgresql://airflow:hidden@localhost/airflow"
    )
    result = world.execute("start")
    key, secret = world.key(), world.settings.secret().decode()
    seen = [str(vars(result))]  # what goes to XCom
    for process in world.processes():
        seen.append(Path(f"/proc/{process.pid}/cmdline").read_text())
    server = world.server(0)
    environ = Path(f"/proc/{server.pid}/environ").read_text()
    assert key in environ
    assert "AIRFLOW" not in environ
    ours = {entry.split("=")[0] for entry in environ.split("\0") if entry.startswith("QWEN_PIPELINE_")}
    assert ours == {"QWEN_PIPELINE_DEPLOYMENT", "QWEN_PIPELINE_PART"}
    world.execute("stop")
    seen += [path.read_text() for path in world.settings.logs.rglob("*.log*")]
    for table in ("pool", "pool_worker", "pool_worker_change", "claim", "progress"):
        seen += [str(row) for row in world.rows(f"select * from {table}")]
    assert not any(key in text or secret in text for text in seen)


def test_every_change_of_a_worker_is_recorded_with_its_evidence(world: World) -> None:
    world.execute("start")
    world.execute("stop")
    changes = world.rows(
        "select state from pool_worker_change where worker_id = 'worker-0' order by change_id"
    )
    assert [row["state"] for row in changes][:3] == ["starting", "warming", "ready"]
