"""start, stop and reap, killed at a sample of their points; the workers are stand-ins for vLLM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.ledger import close, take
from tasks.serving import pools
from tasks.serving.pools import Wanted
from tasks.settings import REPOSITORY
from tests.kill.harness import World, kill_everywhere, stage
from tests.kill.invariants import (
    after_a_stage,
    all_of,
    no_live_claim,
    no_process_left,
    node_locks_are_free,
    one_lease_at_most,
)
from tests.kill.stage_actions import reaping
from tests.runs import a_spec

RUN = "run-1"
STAND_IN = REPOSITORY / "tests" / "serving" / "standin_vllm.py"


@pytest.fixture
def provisioned(world: World) -> World:
    """A run with one slot, whose release and rows are ready."""
    world.environment |= {
        "QWEN_PIPELINE_WORKER_COMMAND": json.dumps([sys.executable, str(STAND_IN)]),
        "QWEN_PIPELINE_CLAIM_WATCH_S": "0.3",
        "QWEN_PIPELINE_REGISTRY_POLL_S": "0.2",
        "QWEN_PIPELINE_SERVING_FLAGS": str(world.root / "no-flags.json"),
    }
    world.register(RUN, a_spec())
    world.finish(RUN, "prepare", {"batch_id": "batch-1", "to_do": 3})
    release = world.root / "release"
    release.mkdir()
    world.finish(RUN, "convert", {"release_id": "tiny-none-0123456789ab", "path": str(release)})
    assert world.run(stage("provision", RUN)).succeeded, world.log()
    return world


def one_pool_serves(world: World) -> None:
    """One keeper, one worker, one open pool, and nothing else of the run."""
    no_process_left(f"{RUN}/keeper", f"{RUN}/worker-")(world)
    no_live_claim("keeper")(world)
    parts = [part_of(process.pid) for process in world.processes()]
    assert parts.count(f"{RUN}/keeper") == 1, f"processes: {sorted(parts)}"
    # A stand-in and the idle engine that it forks.
    assert parts.count(f"{RUN}/worker-0") == 2, f"processes: {sorted(parts)}"
    assert len(world.rows("select pool_id from pool where ended_at is null")) == 1


def part_of(pid: int) -> str:
    marks = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((mark.partition("=")[2] for mark in marks if mark.startswith("QWEN_PIPELINE_PART=")), "")


def nothing_serves(world: World) -> None:
    """No process, no open pool."""
    after_a_stage(world)
    open_pools: list[dict[str, Any]] = world.rows("select pool_id from pool where ended_at is null")
    assert open_pools == []


SERVES = all_of(one_pool_serves, node_locks_are_free(f"{RUN}-keeper.lock"), one_lease_at_most)


def test_start_survives_a_kill_at_its_points(provisioned: World) -> None:
    kill_everywhere(stage("start", RUN), provisioned, check=SERVES, at_most=4, settles=False)


def test_start_survives_a_kill_of_the_keeper_that_it_starts(provisioned: World) -> None:
    kill_everywhere(
        stage("start", RUN),
        provisioned,
        check=SERVES,
        at_most=2,
        in_child="tasks.serving.keeper",
        settles=False,
    )


def test_stop_survives_a_kill_at_its_points(provisioned: World) -> None:
    kill_everywhere(
        stage("stop", RUN), provisioned, check=nothing_serves, before=stage("start", RUN), at_most=3
    )


def test_reap_survives_a_kill_at_its_points(provisioned: World) -> None:
    (lease,) = provisioned.rows("select lease_id from lease")
    wanted = Wanted("tiny-none-0123456789ab", provisioned.root / "release", (), lease["lease_id"])
    with provisioned.ledger() as ledger:
        keeping, _ = take(ledger, RUN, "keeper", frozenset({"keeper"}))
        pools.intend(keeping, f"{RUN}.{keeping.epoch}", provisioned.settings.node, wanted)
        close(ledger, RUN, "failed")
    kill_everywhere(reaping(), provisioned, check=nothing_is_held)


def nothing_is_held(world: World) -> None:
    """No process, no open pool, no live lease, and the run is as closed as it was.

    A reaper that is killed just before its last write leaves its claim live. Nobody waits for that one: the next
    reaping of the run, if there is ever a need, ends it.
    """
    all_of(no_process_left(), no_live_claim("reap"), node_locks_are_free())(world)
    assert world.rows("select pool_id from pool where ended_at is null") == []
    assert world.rows("select lease_id from lease where live") == []
    assert world.rows("select verdict from run") == [{"verdict": "failed"}]
