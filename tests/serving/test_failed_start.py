"""A start that fails leaves no pool, and its devices to the reaper; the run may come back for them before."""

import os
import signal
import threading
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest

from tasks.errors import InputError, StageFailed, Unavailable
from tasks.gpu import inventory
from tasks.reap import reap
from tasks.serving import pools, standing, start
from tasks.serving.probes import NoAnswer, Unfit
from tests.serving.pool_world import World, wait_for

BAD_FLAG = "api_server.py: error: unrecognized arguments: --frobnicate"


def test_a_start_that_fails_abandons_its_lease_and_the_next_reaping_frees_the_devices(world: World) -> None:
    world.configure(worker_environment={"STANDIN_FAIL": BAD_FLAG})
    with pytest.raises(InputError):
        world.execute("start")
    lease = world.lease()
    assert lease.state == "abandoned"
    assert lease.reason is not None
    assert lease.reason.startswith("start failed: ")
    assert reap(world.settings).reaped[0].released == lease.lease_id


def test_a_flag_that_does_not_exist_abandons_the_lease_too(world: World) -> None:
    world.add_run("run-2", cores=(2,), serving={"extra_args": {"model": "another"}})
    with pytest.raises(InputError, match=r"serving.extra_args.model: the pipeline sets this one"):
        world.execute("start", "run-2")
    states = world.rows("select state from lease where run_id = 'run-2'")
    assert [row["state"] for row in states] == ["abandoned"]


def test_the_run_comes_back_for_its_devices_while_nobody_has_reaped_them(world: World) -> None:
    world.configure(worker_environment={"STANDIN_FAIL": BAD_FLAG})
    with pytest.raises(InputError):
        world.execute("start")
    world.configure(worker_environment={})
    assert world.execute("start").facts["workers"] == 2
    assert world.lease().state == "held"


def test_a_run_whose_devices_were_given_back_is_told_to_provision_again(world: World) -> None:
    world.configure(worker_environment={"STANDIN_FAIL": BAD_FLAG})
    with pytest.raises(InputError):
        world.execute("start")
    reap(world.settings)
    world.configure(worker_environment={})
    with pytest.raises(
        StageFailed, match=r"lease 1\) were given back since: run `qwen-pipeline provision` again"
    ):
        world.execute("start")
    world.provision("run-1", (0, 1))
    assert world.execute("start").facts["workers"] == 2


def test_who_comes_back_by_himself_keeps_the_devices_over_a_failure_that_can_pass(world: World) -> None:
    world.configure(worker_environment={"STANDIN_FAIL": "the moon is in the wrong phase"}, worker_attempts=1)
    with pytest.raises(Unavailable, match="the moon is in the wrong phase"):
        world.execute("start", comes_back=True)
    assert world.lease().state == "held"
    assert reap(world.settings).reaped == []
    with pytest.raises(Unavailable):
        world.execute("start", comes_back=False)
    assert world.lease().state == "abandoned"


def test_a_start_whose_keeper_is_killed_says_so_leaves_nothing_and_can_be_tried_again(world: World) -> None:
    world.configure(worker_environment={"STANDIN_START_S": "30"})
    killed = threading.Thread(target=_kill_the_keeper, args=(world,))
    killed.start()
    with pytest.raises(
        Unavailable, match=r"(?s)the keeper of pool .* ended, or was killed.*keeper.log and ends:"
    ):
        world.execute("start")
    killed.join()
    assert world.processes() == []
    assert pools.open_pool(world.ledger, "run-1") is None
    world.configure(worker_environment={})
    assert world.execute("start").facts["workers"] == 2


def _kill_the_keeper(world: World) -> None:
    (keeper,) = wait_for("a worker begins", lambda: world.workers() and world.processes("run-1/keeper"))
    os.kill(keeper.pid, signal.SIGKILL)


class Prove:
    """In place of `standing.prove`: what it is to say first, or for ever."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.says: Iterator[Exception] = iter(())
        self._really = standing.prove
        monkeypatch.setattr(standing, "prove", self)
        monkeypatch.setattr(start, "_LONGEST_POLL_S", 0.0)

    def __call__(self, *arguments: Any) -> int:
        for trouble in self.says:
            raise trouble
        return self._really(*arguments)


def test_a_worker_that_is_full_or_ends_just_as_all_are_ready_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove = Prove(world, monkeypatch)
    prove.says = iter(
        [NoAnswer("worker-0: a request was answered with status 503"), NoAnswer("worker-1: it is dead")]
    )
    assert world.execute("start").facts["workers"] == 2
    assert next(prove.says, None) is None


def test_a_pool_that_was_there_outlives_a_start_that_finds_a_worker_silent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_PATIENCE", 0.0)
    prove = Prove(world, monkeypatch)
    prove.says = repeat(NoAnswer("worker-0: it is full"))
    with pytest.raises(Unavailable, match="does not serve now: worker-0: it is full"):
        world.execute("start", comes_back=True)
    assert world.processes() == [], "of the try that fails"
    prove.says = iter(())
    world.execute("start")
    before = world.processes()
    prove.says = repeat(NoAnswer("worker-0: it is full"))
    with pytest.raises(Unavailable, match="does not serve now: worker-0: it is full"):
        world.execute("start", comes_back=True)
    assert world.processes() == before
    assert pools.open_pool(world.ledger, "run-1") is not None


@pytest.mark.parametrize("stage", ["start", "provision"])
def test_a_pool_that_was_there_keeps_its_lease_when_a_repeated_stage_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr(start, "_PATIENCE", 0.0)
    prove = Prove(world, monkeypatch)
    world.execute("start")
    before = world.processes()
    prove.says = repeat(NoAnswer("worker-0: it is full"))
    monkeypatch.setattr(inventory, "available_cores", tuple)
    with pytest.raises((StageFailed, Unavailable), match=r"worker-0: it is full|does not offer"):
        world.execute(stage)
    assert world.lease().state == "held"
    assert reap(world.settings).reaped == []
    assert world.processes() == before


def test_a_pool_that_serves_strangers_is_no_matter_of_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Prove(world, monkeypatch).says = iter([Unfit("worker-0: a client without the key was answered")])
    with pytest.raises(
        StageFailed, match="the pool is up but does not serve: worker-0: a client without the key"
    ):
        world.execute("start")
    assert world.processes() == []
