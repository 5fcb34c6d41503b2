"""Starts of the real vLLM on CPU that are stopped and killed; see test_real_workers.py."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.reap import reap
from tests.serving.pool_world import World, wait_for
from tests.serving.real_world import (
    ASKED_FOR,
    is_ready,
    nothing_is_left,
    real_world,
    see,
    start_in_a_process,
)

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(3600), ASKED_FOR]


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A run with one CPU slot."""
    with real_world(tmp_path, database_url, monkeypatch, cores=(0,)) as made:
        yield made


def test_a_worker_is_stopped_at_any_moment_of_its_start(world: World) -> None:
    for after_s in (1, 5, 20):
        starting = start_in_a_process(world)
        wait_for("the server exists", lambda: world.workers(), within_s=120)
        time.sleep(after_s)
        processes = len(world.processes())
        see(
            f"stopped {after_s} s into the start",
            processes_before=processes,
            seconds=world.execute("stop").seconds,
            start_ended_with=starting.wait(timeout=60),
        )
        nothing_is_left(world)


def test_a_start_that_is_killed_at_any_moment_leaves_nothing_after_reap(world: World) -> None:
    for moment, has_come in MOMENTS.items():
        starting = start_in_a_process(world)
        wait_for(moment, lambda: has_come(world), within_s=900)  # noqa: B023
        starting.kill()
        starting.wait()
        _reaped(world, moment)
        world.provision("run-1", (0,))


def test_a_start_that_is_killed_when_the_worker_answers_is_not_needed_any_more(world: World) -> None:
    starting = start_in_a_process(world)
    wait_for("the worker answers", lambda: _rows(world, "pool_worker", "state = 'warming'"), within_s=900)
    starting.kill()
    starting.wait()
    began = time.monotonic()
    message = world.execute("start").message
    assert is_ready(world)
    seconds = round(time.monotonic() - began, 1)
    see("killed when the worker answers, then started again", seconds=seconds, says=message)
    _reaped(world, "the worker answers")


def _reaped(world: World, moment: str) -> None:
    """A reaping ends what the killed start left, whatever there is."""
    processes = len(world.processes())
    began = time.monotonic()
    report = reap(world.settings, "run-1", force=True)
    seconds = time.monotonic() - began
    nothing_is_left(world)
    assert not _rows(world, "pool", "ended_at is null")
    see(
        f"start killed when {moment}",
        processes_before=processes,
        reaped=report.message,
        seconds=round(seconds, 2),
    )


def _rows(world: World, table: str, where: str) -> list[dict[str, Any]]:
    return world.rows(f"select * from {table} where {where}")


def _claimed(world: World, stage: str) -> bool:
    return bool(_rows(world, "claim", f"stage = '{stage}' and ended_at is null"))


def _age_of_the_worker_s(world: World) -> float:
    started = world.rows(
        "select extract(epoch from clock_timestamp() - pool_worker.changed_at)::float as age from pool_worker "
        "inner join pool on pool_worker.pool_id = pool.pool_id "
        "where pool.ended_at is null and pool_worker.pid is not null"
    )
    return started[0]["age"] if started else 0.0


def _has_an_engine(world: World) -> bool:
    return any(Path(f"/proc/{one.pid}/comm").read_text().startswith("VLLM::") for one in world.workers())


MOMENTS: dict[str, Callable[[World], Any]] = {
    "it has claimed its stage": lambda world: _claimed(world, "start"),
    "it has claimed the keeper": lambda world: _claimed(world, "keeper"),
    "the pool is intended": lambda world: _rows(world, "pool", "ended_at is null"),
    "the keeper's process exists": lambda world: world.processes("run-1/keeper"),
    "the keeper answers": lambda world: _rows(world, "pool", "ended_at is null and registry is not null"),
    "the worker's process exists": lambda world: world.workers(),
    "the worker is 1 s old": lambda world: _age_of_the_worker_s(world) > 1,
    "the worker is 5 s old": lambda world: _age_of_the_worker_s(world) > 5,
    "its engine exists": _has_an_engine,
}
"""Of a start, in their order; how long each takes depends on how busy the machine is."""
