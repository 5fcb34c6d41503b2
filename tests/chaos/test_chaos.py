"""What the matrix says of itself; cells of it are in test_with_airflow.py."""

from tasks.stage_list import STAGES
from tests.chaos.__main__ import table
from tests.chaos.cell import Result
from tests.chaos.events import EVENTS

BY_NAME = {event.name: event for event in EVENTS}


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
