"""Reaping: what is over ends, what is healthy stays. The workers are stand-ins."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import InputError, StageFailed, Unavailable
from tasks.ledger import Ledger, close, leases, load, take
from tasks.node import lock, processes
from tasks.node.processes import Process, this_process
from tasks.reap import as_facts, reap
from tasks.serving import leftovers, pools
from tasks.serving.pools import Attempt
from tests.runs import python
from tests.serving.pool_world import World, make_world, wait_for


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A run with one CPU slot that has come as far as provision."""
    made = make_world(tmp_path, database_url, monkeypatch)
    made.add_run("run-1", cores=(0,))
    try:
        yield made
    finally:
        made.close()


def test_a_healthy_run_is_not_touched_and_a_person_can_end_it_all_the_same(world: World) -> None:
    world.execute("start")
    before = world.processes()
    for _ in range(2):
        report = reap(world.settings)
        assert report.reaped == []
        assert "its keeper lives" in report.left_alone["run-1"]
    assert world.processes() == before
    forced = reap(world.settings, "run-1", force=True)
    assert [one.run_id for one in forced.reaped] == ["run-1"]
    assert world.processes() == []
    assert leases.live_leases(world.ledger) == []
    assert reap(world.settings).reaped == [], "twice is as once"


def test_what_a_closed_run_left_is_ended_and_the_run_stays_closed(world: World) -> None:
    world.configure(claim_watch_s=600)  # so that the keeper does not notice by itself
    world.execute("start")
    close(world.ledger, "run-1", "failed")
    facts = as_facts(reap(world.settings))
    assert facts["reaped"][0]["why"] == "the run is closed (failed)"
    assert facts["reaped"][0]["lease_released"] == 1
    assert world.processes() == []
    assert load(world.ledger, "run-1").verdict == "failed"


def test_what_a_killed_keeper_left_is_ended_but_the_open_run_keeps_its_devices(world: World) -> None:
    world.execute("start")
    keeper = world.pool().keeper
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGKILL)
    wait_for("the kernel ends the server", lambda: not world.server(0).is_alive())
    assert world.workers(), "its engine lives on"
    assert reap(world.settings).reaped[0].why == "its keeper is dead"
    assert world.processes() == []
    assert len(leases.live_leases(world.ledger)) == 1
    world.execute("start")
    assert world.registry()["workers"][0]["state"] == "ready"


def test_an_expired_lease_is_released_after_its_processes_have_ended(world: World) -> None:
    world.configure(lease_renew_s=600)
    world.execute("start")
    keeper = world.pool().keeper
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGSTOP)  # it cannot end by its own clock
    world.configure(stop_grace_s=0.3, drain_s=0.3)
    claim, _ = take(world.ledger, "run-1", "test", frozenset({"test"}))
    with claim.writing() as connection:
        connection.execute("update lease set expires_at = now() - interval '1 second'")
    report = reap(world.settings)
    assert report.reaped[0].why == "its lease expired"
    assert world.processes() == []
    assert leases.live_leases(world.ledger) == []


def test_a_process_of_a_run_that_the_ledger_does_not_know_is_ended(world: World) -> None:
    stray = processes.spawn(
        ["sleep", "600"],
        processes.environment("no-such-run/worker-3"),
        world.home / "log",
        outlives_parent=True,
    )
    bystander = processes.spawn(
        ["sleep", "600"],
        processes.environment("no-such-run/convert"),
        world.home / "log",
        outlives_parent=True,
    )
    report = reap(world.settings)
    assert [(one.run_id, one.ended) for one in report.reaped] == [("no-such-run", (stray.pid,))]
    assert stray.wait() == -signal.SIGTERM or stray.returncode == -signal.SIGKILL
    assert bystander.poll() is None, "not a keeper and not a worker"
    bystander.kill()
    bystander.wait()


def test_a_run_that_a_stage_acts_for_is_left_alone(world: World) -> None:
    close(world.ledger, "run-1", "failed")
    with lock.held(world.settings.locks / "run-1-devices.lock", "stage start of run run-1", 1.0):
        report = reap(world.settings)
    assert report.reaped == []
    assert "stage start of run run-1" in report.left_alone["run-1"]


def test_a_person_ends_also_a_stage_that_acts_for_the_run(world: World) -> None:
    with _acting_for("run-1", world) as stage:
        assert "stage start" in reap(world.settings, "run-1").left_alone["run-1"]
        forced = reap(world.settings, "run-1", force=True)
        assert forced.reaped[0].released is not None
        assert stage.wait(10) == -signal.SIGKILL


def test_a_stopped_stage_does_not_hold_its_devices_for_ever(world: World) -> None:
    close(world.ledger, "run-1", "failed")
    with _acting_for("run-1", world) as stage:
        assert reap(world.settings).reaped == []
        stage.send_signal(signal.SIGSTOP)
        held_by = processes.identify(stage.pid)
        assert held_by is not None
        wait_for("it is stopped", held_by.is_stopped)
        assert [one.why for one in reap(world.settings).reaped] == ["the run is closed (failed)"]
        assert stage.wait(10) == -signal.SIGKILL


@contextmanager
def _acting_for(run_id: str, world: World) -> "Iterator[subprocess.Popen[str]]":
    """A process that holds the lock of a run's devices, as `start` does."""
    code = (
        "import sys, time; from pathlib import Path; from tasks.node import lock\n"
        "with lock.held(Path(sys.argv[1]), 'stage start', 1.0): print('held', flush=True); time.sleep(600)"
    )
    with python(code, str(world.settings.locks / f"{run_id}-devices.lock")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_run_that_cannot_be_ended_does_not_keep_others_from_being_reaped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run_id in ("a", "z"):
        world.add_run(run_id, cores=(1 if run_id == "a" else 2,))
        close(world.ledger, run_id, "failed")
    end = leftovers.end

    def some_hang(run_id: str, *others: Any, **more: Any) -> list[Process]:
        return [this_process()] if run_id == "a" else end(run_id, *others, **more)

    monkeypatch.setattr(leftovers, "end", some_hang)
    with pytest.raises(StageFailed, match=r"(?s)of run a do not end.*reaped 1 run\(s\): z"):
        reap(world.settings)
    assert {lease.run_id for lease in leases.live_leases(world.ledger)} == {"a", "run-1"}
    (claim,) = world.rows("select outcome from claim where run_id = 'a' and stage = 'reap'")
    assert claim["outcome"] == "failed"


def test_a_run_whose_lock_cannot_be_had_does_not_keep_others_from_being_reaped(world: World) -> None:
    for run_id, core in (("a", 1), ("z", 2)):
        world.add_run(run_id, cores=(core,))
        close(world.ledger, run_id, "failed")
    (world.settings.locks / "a-devices.lock").mkdir(parents=True)
    with pytest.raises(StageFailed, match=r"(?s)^run a: .*Is a directory.*reaped 1 run\(s\): z"):
        reap(world.settings)


def test_a_ledger_that_does_not_answer_about_one_run_is_asked_about_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run_id, core in (("a", 1), ("z", 2)):
        world.add_run(run_id, cores=(core,))
        close(world.ledger, run_id, "failed")
    attempts = pools.attempts

    def some_are_locked(ledger: Ledger, run_id: str) -> list[Attempt]:
        if run_id == "a":
            raise Unavailable("canceling statement due to lock timeout")
        return attempts(ledger, run_id)

    monkeypatch.setattr(pools, "attempts", some_are_locked)
    with pytest.raises(StageFailed, match=r"(?s)^run a: .*lock timeout.*reaped 1 run\(s\): z"):
        reap(world.settings)


def test_a_run_that_an_older_version_has_frozen_is_ended_without_its_spec(world: World) -> None:
    close(world.ledger, "run-1", "failed")
    with world.ledger.transaction() as connection:
        connection.execute("""update run set spec = spec || '{"a_field_of_the_past": 1}'""")
    with pytest.raises(InputError):
        load(world.ledger, "run-1")
    assert [one.released for one in reap(world.settings).reaped] == [1]


def test_a_run_that_somebody_opens_again_meanwhile_stays_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    close(world.ledger, "run-1", "failed")
    end = leftovers.end

    def and_meanwhile(run_id: str, *others: Any, **more: Any) -> list[Process]:
        take(world.ledger, run_id, "prepare", frozenset())
        return end(run_id, *others, **more)

    monkeypatch.setattr(leftovers, "end", and_meanwhile)
    assert [one.released for one in reap(world.settings).reaped] == [1]
    assert load(world.ledger, "run-1").verdict is None
