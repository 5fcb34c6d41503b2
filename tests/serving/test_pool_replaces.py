"""The pool with a stand-in for vLLM: what its keeper does about workers that die or hang."""

import os
import signal
from pathlib import Path

import pytest

from tests.serving.pool_world import World, kill, status_of, wait_for


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


def test_a_slot_that_keeps_failing_is_given_up_and_tried_again_by_the_next_start(world: World) -> None:
    world.configure(worker_attempts=1)
    world.execute("start")
    kill(world.server(0))
    wait_for("given up", lambda: world.registry()["workers"][0]["given_up"])
    keeper = world.pool().keeper
    assert world.execute("start").changed
    assert world.pool().keeper == keeper
    assert {worker["state"] for worker in world.registry()["workers"]} == {"ready"}
