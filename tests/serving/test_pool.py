"""The pool with a stand-in for vLLM: what keeper, start and stop do around it."""

import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tasks.errors import InputError, StageFailed
from tasks.ledger import take
from tasks.serving import pools, ports
from tests.serving.forwarder import Forwarder
from tests.serving.pool_world import World, get_text, status_of, wait_for


def kill(process: object) -> None:
    os.kill(process.pid, signal.SIGKILL)  # type: ignore[attr-defined]


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


def test_a_killed_worker_alone_is_replaced_in_its_slot(world: World) -> None:
    world.execute("start")
    lost, kept = world.server(0), world.server(1)
    engines = [process for process in world.workers() if process not in (lost, kept)]
    kill(lost)
    assert world.execute("start").changed, "also when the keeper has not noticed yet"
    assert world.server(1) == kept
    assert kept.is_alive()
    assert world.server(0) != lost
    assert world.pool().pool_id == world.registry()["pool_id"]
    assert sum(engine.is_alive() for engine in engines) == 1, "the engine of the killed server was ended"


def test_the_registry_tells_of_a_lost_worker_at_once(world: World) -> None:
    world.execute("start")
    kill(world.server(0))
    wait_for("clients hear of it", lambda: world.registry()["workers"][0]["state"] != "ready", within_s=2)


def test_a_stopped_engine_is_found_although_health_answers_and_is_replaced(world: World) -> None:
    world.configure(worker_silence_s=6, canary_timeout_s=5)
    world.execute("start")
    server, engine = world.server(0), world.engine(0)
    url = world.registry()["workers"][0]["url"]
    os.kill(engine.pid, signal.SIGSTOP)
    wait_for("clients hear of it", lambda: world.registry()["workers"][0]["state"] == "suspect", within_s=2)
    assert status_of(f"{url}/health") == 200
    wait_for("another", lambda: world.server(0) != server and _all_ready(world), within_s=40)
    assert not engine.is_alive()
    evidence = [row["evidence"] for row in world.rows("select evidence from pool_worker_change")]
    assert any("stopped by a signal (state T)" in text for text in evidence)
    assert any("no token was made for" in text and "hangs" in text for text in evidence)


def test_a_stopped_engine_that_goes_on_is_ready_again(world: World) -> None:
    world.execute("start")
    engine = world.engine(0)
    os.kill(engine.pid, signal.SIGSTOP)
    wait_for("suspect", lambda: world.registry()["workers"][0]["state"] == "suspect")
    os.kill(engine.pid, signal.SIGCONT)
    wait_for("ready again", lambda: _all_ready(world))
    assert world.engine(0) == engine


def test_a_stopped_api_server_is_suspect_at_once_and_ready_when_it_goes_on(world: World) -> None:
    world.execute("start")
    server = world.server(0)
    os.kill(server.pid, signal.SIGSTOP)
    wait_for("clients hear of it", lambda: world.registry()["workers"][0]["state"] == "suspect", within_s=2)
    os.kill(server.pid, signal.SIGCONT)
    wait_for("ready again", lambda: _all_ready(world))
    assert world.server(0) == server


def test_a_killed_engine_takes_its_worker_along_and_both_are_replaced(world: World) -> None:
    world.execute("start")
    engine = world.engine(0)
    kill(engine)
    wait_for("clients hear of it", lambda: world.registry()["workers"][0]["state"] != "ready", within_s=2)
    wait_for("another", lambda: _all_ready(world))
    assert world.engine(0) != engine


def test_a_worker_that_served_is_replaced_whatever_its_log_says_at_its_end(world: World) -> None:
    says = "FileNotFoundError: [Errno 2] No such file or directory: '/psm_1'"
    world.configure(worker_environment={"STANDIN_LAST_WORDS": says})
    world.execute("start")
    server = world.server(0)
    kill(world.engine(0))
    wait_for("another", lambda: world.server(0) != server and _all_ready(world))
    evidence = world.rows("select evidence from pool_worker_change where state = 'dead'")
    assert says in evidence[0]["evidence"]


def _all_ready(world: World) -> bool:
    return {worker["state"] for worker in world.registry()["workers"]} == {"ready"}


def test_a_run_goes_on_without_a_slot_that_was_given_up(world: World) -> None:
    world.configure(worker_attempts=1)
    facts = world.execute("start").facts
    assert facts["workers"] == 2
    kill(world.server(0))
    wait_for("given up", lambda: world.registry()["workers"][0]["given_up"])
    # One is left, which is enough: the default.
    assert world.registry()["workers"][1]["state"] == "ready"
    assert world.pool().keeper.is_alive()


def test_a_pool_below_its_minimum_ends(world: World) -> None:
    world.close_runs()
    world.add_run("run-2", serving={"min_workers": 2})
    world.run_id = "run-2"
    world.configure(worker_attempts=1)
    world.execute("start")
    kill(world.server(0))
    wait_for("everything ended", lambda: not world.processes(), within_s=60)
    (pool,) = world.rows("select reason from pool where run_id = 'run-2'")
    assert "1 of 2 worker(s) are left, and serving.min_workers is 2" in pool["reason"]


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


def test_temporary_files_of_killed_workers_are_removed(world: World) -> None:
    world.execute("start")
    environ = Path(f"/proc/{world.server(0).pid}/environ").read_text().split("\0")
    (folder,) = {Path(entry.partition("=")[2]) for entry in environ if entry.startswith("TMPDIR=")}
    (folder / "socket").touch()
    assert len(str(folder)) < 107 - 37, "vLLM adds a name, and a socket's path is short"
    for victim in (world.pool().keeper, *world.workers()):
        kill(victim)
    world.execute("stop")
    assert not folder.exists()
    assert not folder.parent.exists()


@pytest.mark.parametrize("how", ["all at once", "keeper first"])
def test_shared_memory_of_killed_workers_is_removed(world: World, how: str) -> None:
    shared = Path(f"/dev/shm/psm_{world.settings.deployment}")
    world.configure(worker_environment={"STANDIN_SHM": str(shared)})
    world.execute("start")
    assert shared.exists()
    assert world.rows("select shared_memory from pool_worker")[0]["shared_memory"] == [str(shared)]
    victims = [world.pool().keeper, *(world.workers() if how == "all at once" else [])]
    for victim in victims:
        kill(victim)
    world.execute("stop")
    assert not shared.exists()


def test_a_workers_log_is_read_through_the_registry_with_the_key_only(world: World) -> None:
    facts = world.execute("start").facts
    url = f"{facts['registry']}/v1/logs/worker-0?lines=5"
    assert status_of(url) == 401
    assert "this is a stand-in for vllm serve" in get_text(url, world.key())
    assert "ready" in get_text(f"{facts['registry']}/v1/logs/keeper", world.key())
    assert status_of(f"{facts['registry']}/v1/logs/..%2Fkeeper", world.key()) == 404


def test_a_slot_that_keeps_failing_is_given_up_and_tried_again_by_the_next_start(world: World) -> None:
    world.configure(worker_attempts=1)
    world.execute("start")
    kill(world.server(0))
    wait_for("given up", lambda: world.registry()["workers"][0]["given_up"])
    keeper = world.pool().keeper
    assert world.execute("start").changed
    assert world.pool().keeper == keeper
    assert {worker["state"] for worker in world.registry()["workers"]} == {"ready"}


def test_stop_leaves_no_process_and_no_port(world: World) -> None:
    world.execute("start")
    urls = [worker["url"] for worker in world.registry()["workers"]]
    result = world.execute("stop")
    assert result.changed
    assert world.processes() == []
    assert ports.occupied([int(url.rsplit(":", 1)[1]) for url in urls]) == []
    assert pools.open_pool(world.ledger, "run-1") is None
    again = world.execute("stop")
    assert not again.changed
    assert "no pool is running" in again.message


def test_stop_lets_the_keeper_end_its_workers_itself(world: World) -> None:
    world.execute("start")
    world.execute("stop")
    log = (world.settings.logs / "run-1" / "keeper.log").read_text()
    assert "worker-1: stopped: nothing of it is left" in log
    assert "ended: " in log


@pytest.mark.parametrize("stage", ["start", "stop"])
def test_after_a_killed_keeper_the_next_stage_finds_what_it_left(world: World, stage: str) -> None:
    world.execute("start")
    keeper, before = world.pool().keeper, world.workers()
    kill(keeper)
    wait_for("the kernel ends the servers", lambda: not world.server(0).is_alive())
    assert any(process.is_alive() for process in before), "engines live on, as vLLM's do"
    assert world.execute(stage).changed
    assert not any(process.is_alive() for process in before)
    if stage == "start":
        assert {worker["state"] for worker in world.registry()["workers"]} == {"ready"}
    else:
        assert world.processes() == []


def test_a_keeper_that_hangs_is_replaced(world: World) -> None:
    world.configure(stop_grace_s=0.5, drain_s=0.5)
    world.execute("start")
    keeper = world.pool().keeper
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGSTOP)
    assert world.execute("start").changed
    assert not keeper.is_alive()
    assert {worker["state"] for worker in world.registry()["workers"]} == {"ready"}


@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_the_pool_ends_when_its_lease_does_with_the_database_gone(world: World, how: str) -> None:
    with Forwarder(world.url) as forwarder:
        (world.home / "ledger").write_text(forwarder.url)
        world.configure(lease_s=12.0, lease_renew_s=0.5, stop_grace_s=1.0)
        world.execute("start")
        keeper = world.pool().keeper
        assert keeper is not None
        forwarder.fail(how)
        wait_for("the pool ended", lambda: not world.processes(), within_s=60)
    log = (world.settings.logs / "run-1" / "keeper.log").read_text()
    assert "the lease expires and could not be renewed" in log
    (world.home / "ledger").write_text(world.url)
    assert world.execute("stop").changed, "the ledger did not know yet"


def test_the_keeper_renews_the_lease(world: World) -> None:
    world.configure(lease_s=2 * world.settings.lease_s, lease_renew_s=0.3)
    expiry = "select expires_at from lease"
    before = world.rows(expiry)[0]["expires_at"]
    world.execute("start")
    for _ in range(2):
        wait_for("a renewal", lambda: world.rows(expiry)[0]["expires_at"] > before)  # noqa: B023
        before = world.rows(expiry)[0]["expires_at"]


def test_a_keeper_whose_claim_was_taken_ends_its_pool(world: World) -> None:
    world.execute("start")
    take(world.ledger, "run-1", "keeper", frozenset({"keeper"}))
    wait_for("everything ended", lambda: not world.processes(), within_s=60)


def test_a_keeper_ends_its_pool_when_the_run_is_closed(world: World) -> None:
    from tasks.ledger import close

    world.execute("start")
    close(world.ledger, "run-1", "failed")
    wait_for("everything ended", lambda: not world.processes(), within_s=60)


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
