"""The recovery matrix: every stage x everything that goes wrong. `make chaos`.

    python -m tests.chaos [--stages run,publish] [--events "disk full,run cleared"] [--again] [--real]

Takes about a minute a cell; with --real, for the cells that matter to the real vLLM, about five. Results are kept in
HOME/results.json, and a cell that has one is not run again, so the program can be stopped at any time and goes on
from there. Exit status 1 when a cell is wrong.
"""

import argparse
import json
import signal
import sys
from pathlib import Path
from types import FrameType

from tasks.node.atomic import replace_text
from tasks.settings import REPOSITORY
from tasks.stage_list import STAGES
from tests.chaos.cell import Result, run_cell
from tests.chaos.events import EVENTS
from tests.chaos.real_engines import CELLS as REAL_CELLS
from tests.chaos.real_engines import RealEngines
from tests.chaos.world import World


def main() -> int:
    """Run what has no result yet; print the table."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--home", type=Path, help="by default var/chaos, or var/chaos-real")
    parser.add_argument("--real", action="store_true", help="with the real vLLM on CPU, its own cells")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--events", default=",".join(event.name for event in EVENTS))
    parser.add_argument("--again", action="store_true", help="also cells that have a result")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    events = {event.name: event for event in EVENTS}
    cells = [(stage, event) for event in options.events.split(",") for stage in options.stages.split(",")]
    if options.real:
        cells = [cell for cell in REAL_CELLS if cell in cells]
    world = _world(options.home, real=options.real)
    path = world.home / "results.json"
    results = _read(path)
    todo = [cell for cell in cells if options.again or cell not in results]
    try:
        if todo:
            engines = "engines are vLLM on a CPU core" if options.real else "engines are stand-ins"
            print(
                f"{engines}, the GPU is simulated; Airflow, PostgreSQL, Spark and the hub's client are real",
                flush=True,
            )
            world.start()
        for stage, event in todo:
            world.start()
            result = run_cell(world, stage, events[event], options.seed)
            results[stage, event] = result
            replace_text(path, json.dumps([one.as_json() for one in results.values()], indent=1) + "\n")
            print(_line(result), flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
    finally:
        world.end()
    print(table({cell: results[cell] for cell in cells if cell in results}))
    return 1 if any(result.wrong for result in results.values()) else 0


def _world(home: Path | None, *, real: bool) -> World:
    if real:
        return RealEngines(home or REPOSITORY / "var" / "chaos-real")
    return World(home or REPOSITORY / "var" / "chaos")


def table(results: dict[tuple[str, str], Result]) -> str:
    """Stages down, events across: ok with the seconds it took, or WRONG."""
    stages = list(dict.fromkeys(stage for stage, _ in results))
    events = list(dict.fromkeys(event for _, event in results))
    lines = ["| stage | " + " | ".join(events) + " |", "|---" * (len(events) + 1) + "|"]
    for stage in stages:
        found = [results.get((stage, event)) for event in events]
        lines.append(f"| {stage} | " + " | ".join("" if one is None else _cell(one) for one in found) + " |")
    right = sum(not result.wrong for result in results.values())
    twice = sum(result.generated_twice for result in results.values())
    lines.append(f"\n{right} of {len(results)} cells right; {twice} rows were generated twice in all")
    return "\n".join(lines)


def _cell(result: Result) -> str:
    return "WRONG" if result.wrong else f"ok {result.seconds:.0f} s"


def _line(result: Result) -> str:
    what = "; ".join(result.wrong) or "ok"
    return (
        f"{result.stage:<10} {result.event:<22} {result.seconds:>6.1f} s  run {result.state}, again {result.again}, "
        f"{result.generated_twice} generated twice: {what}"
    )


def _read(path: Path) -> dict[tuple[str, str], Result]:
    if not path.exists():
        return {}
    found = [Result(**{**one, "wrong": tuple(one["wrong"])}) for one in json.loads(path.read_text())]
    return {(one.stage, one.event): one for one in found}


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # A second signal must not stop the cleaning up.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
