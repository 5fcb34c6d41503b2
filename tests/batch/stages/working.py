"""A batch through all its stages."""

from collections.abc import Callable
from typing import Any

from tasks.batch.records import Result
from tests.batch.world import World

IDS = [f"r{n:03d}" for n in range(60)]


def work(world: World, run_stage: Callable[[str], Any], run_id: str) -> dict[str, Any]:
    """All stages of the batch; returns what each one did."""
    return {
        stage: (run_stage(run_id) if stage == "run" else world.execute(stage, run_id))
        for stage in ("prepare", "run", "reconcile", "publish")
    }


def a_result(row_id: str, answer: str) -> Result:
    """As an engine's answer is kept."""
    return Result(row_id, "answered", answer, None, None, "stop", 3, 1, 0.1, "worker-0", 1, "release-1")
