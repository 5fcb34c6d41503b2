"""A batch through all its stages."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tasks.batch import in_ledger, prepared, rows, segments
from tasks.batch.records import Result
from tasks.ledger.claims import facts_of, take
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


def finish_rows(world: World, run_id: str, ids: Iterable[str]) -> None:
    """What a run of the stage `run` leaves that answered these rows."""
    with world.ledger() as ledger:
        folder = Path((facts_of(ledger, run_id, "prepare") or {})["folder"])
        claim, _ = take(ledger, run_id, "run", frozenset({"run"}))
        assert in_ledger.become_writer(claim, folder.name) is None
        attempt = segments.attempt_prefix(run_id, claim.epoch)
        with segments.SegmentWriter(folder / "segments", attempt) as writer:
            for row_id in ids:
                writer.append(a_result(row_id, f"said to {row_id}"))
        rows.adopt(claim, prepared.load(folder))
        claim.finish("done", "answered by hand", {})
