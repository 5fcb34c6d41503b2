"""What the matrix says of itself; cells of it are in test_with_airflow.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from demo.airflow_api import AirflowApi
from tasks.node.processes import this_process
from tasks.serving import flags
from tasks.settings import Settings
from tasks.spec import parse
from tasks.stage_list import STAGES
from tests.chaos.__main__ import table
from tests.chaos.cell import Result, reach
from tests.chaos.events import EVENTS, Act, Missed
from tests.chaos.real_engines import CELLS, RealEngines
from tests.chaos.world import Batch, World

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


@pytest.mark.parametrize("still_acts", [True, False])
def test_an_event_comes_while_the_stage_is_at_work_or_not_at_all(still_acts: bool) -> None:
    process = this_process()
    seen = iter([None, process, process if still_acts else None])
    world = SimpleNamespace(acting=lambda run, stage: next(seen))
    act = Act(cast(World, world), cast(AirflowApi, None), "qwen_batch", "run-1", "provision")
    if still_acts:
        reach(act, BY_NAME["run marked failed"], 0.0)
    else:
        with pytest.raises(Missed, match="stage provision was over"):
            reach(act, BY_NAME["run marked failed"], 0.0)
    assert next(seen, "all looked at") == "all looked at"


def test_twelve_cells_are_for_the_real_engine() -> None:
    assert len(set(CELLS)) == 12
    assert all(stage in STAGES and event in BY_NAME for stage, event in CELLS)


def test_the_real_engine_takes_the_spec_of_its_cells(tmp_path: Path) -> None:
    spec = parse(RealEngines(tmp_path).spec(Batch("cell-1", tmp_path, tmp_path)))
    flags.check(spec.serving.extra_args, Settings().serving_flags)


def test_what_a_real_engine_did_twice_is_read_off_its_log(tmp_path: Path) -> None:
    world = RealEngines(tmp_path)
    logs = world.disk / "pipeline" / "logs" / "one"
    logs.mkdir(parents=True)
    asked = "DEBUG Request chatcmpl-{} details: prompt: 'question cell-1-{} : what is it ?', prompt_token_ids: []\n"
    answered = "INFO Generated response chatcmpl-{}: output: 'x', finish_reason: length\n"
    first = asked.format("a", "r") + answered.format("a") + asked.format("b", "s")
    second = asked.format("c", "s") + answered.format("c") + asked.format("d", "r") + answered.format("d")
    (logs / "worker-0.log.1").write_text(first)
    (logs / "worker-0.log").write_text(second)
    assert world.generated_twice(Batch("cell-1", tmp_path, tmp_path)) == 1
    assert world.generated_twice(Batch("cell-2", tmp_path, tmp_path)) == 0
