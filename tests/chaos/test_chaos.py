"""A small part of the matrix; `make chaos` runs all of it."""

import os

import pytest

from tasks.stages import STAGES
from tests.chaos.__main__ import table
from tests.chaos.cell import Result, run_cell
from tests.chaos.events import EVENTS
from tests.chaos.world import World

CELLS = [("run", "task killed -9"), ("start", "run marked failed")]
if not os.environ.get("QWEN_TEST_EVERYTHING"):
    del CELLS[1:]
BY_NAME = {event.name: event for event in EVENTS}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stage", "event"), CELLS)
def test_nothing_is_lost_doubled_or_leaked(world: World, stage: str, event: str) -> None:
    result = run_cell(world, stage, BY_NAME[event], seed=0)
    assert result.wrong == (), result


def test_the_table_names_every_cell_and_what_is_wrong() -> None:
    results = {
        (stage, event): Result(stage, event, "success", "success", 1, ("lost",) if event == "b" else (), 61.4)
        for stage in ("run", "stop")
        for event in ("a", "b")
    }
    lines = table(results).splitlines()
    assert lines[2:4] == ["| run | ok 61 s | WRONG |", "| stop | ok 61 s | WRONG |"]
    assert lines[-1] == "2 of 4 cells right; 4 rows were generated twice in all"


def test_every_stage_meets_ten_kinds_of_failure() -> None:
    assert len(STAGES) == 11
    assert len(EVENTS) == len(BY_NAME) == 10
