"""Two people, or Airflow and a person, act for one pool at once. The workers are stand-ins for vLLM."""

import subprocess
import sys

from tasks.serving import pools
from tests.serving.pool_world import World, wait_for


def command(verb: str) -> "subprocess.Popen[str]":
    """A verb of the command line, in a process of its own."""
    words = [sys.executable, "-m", "tasks.cli.main", verb, "--run", "run-1"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_two_starts_at_once_end_in_one_pool(world: World) -> None:
    both = [command("start"), command("start")]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert 0 in [process.returncode for process in both], said
    assert len(world.processes("run-1/keeper")) == 1
    assert {worker["state"] for worker in world.registry()["workers"]} == {"ready"}
    assert len(world.rows("select 1 from pool where ended_at is null")) == 1
    assert not any("Traceback" in text for text in said), said


def test_a_stop_ends_a_start_that_is_under_way_and_nothing_is_left(world: World) -> None:
    world.configure(worker_environment={"STANDIN_START_S": "30"})
    starting = command("start")
    wait_for("a worker begins", lambda: world.workers(), within_s=180)
    world.execute("stop")
    assert starting.wait(30) != 0
    assert world.processes() == []
    assert pools.open_pool(world.ledger, "run-1") is None


def test_a_start_that_comes_during_a_stop_waits_and_brings_a_new_pool(world: World) -> None:
    world.configure(worker_environment={"STANDIN_DEAF": "1"}, stop_grace_s=3)
    first = world.execute("start").facts["pool_id"]
    stopping = command("stop")
    keeper = world.pool().keeper
    assert keeper is not None
    log = world.settings.logs / "run-1" / "keeper.log"
    wait_for("the pool ends", lambda: "the pool ends" in log.read_text(), within_s=180)
    assert world.execute("start").facts["pool_id"] != first
    assert stopping.wait(30) is not None
    assert {worker["state"] for worker in world.registry()["workers"]} == {"ready"}
    assert not keeper.is_alive()
