"""`python -m demo up` runs the whole pipeline here; `python -m demo down` ends what is left of it.

Exit status 0: each row was answered or has a typed failure, and no process is left (unless --keep).
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from demo import simulated, steps, summary
from demo.children import kept_port
from demo.world import LOCAL_MODELS, REPOSITORY, SCHEMES, SIMULATED_NODES, World
from tasks.errors import StageError, StageFailed


def main() -> int:
    """Run one verb; returns the exit status."""
    options = parse()
    console = Console(soft_wrap=True)
    try:
        world = _world(options)
        # What this process starts by itself gets the same settings as Airflow's tasks.
        os.environ.update(world.environment())
        if options.verb == "down":
            return _down(world, console)
        return _up(world, console, keep=options.keep)
    except StageError as error:
        console.print(f"[red]demo:[/] {error}", highlight=False)
        return error.exit_status
    except KeyboardInterrupt:
        console.print("ended; nothing is left running. `make demo` goes on from here")
        return 130


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's choices; exits with 2 when there is no such choice."""
    return _parser().parse_args(arguments)


def _up(world: World, console: Console, *, keep: bool) -> int:
    began = time.monotonic()
    steps.interrupt_on_signals()
    ended_well = False
    try:
        airflow = steps.bring_up(world, console)
        run = steps.run(world, airflow, console)
        if run.state != "success":
            raise StageFailed(
                f"run {run.run_id} ended as {run.state}; the table above names the stage, and its log is below "
                f"{world.home / 'airflow' / 'logs'}"
            )
        document = summary.summarise(world, run.run_id)
        summary.write(world, document)
        summary.show(world, document, console)
        if world.sim is not None:
            console.print(f"\n{simulated.at_the_end(world, run.run_id)}", highlight=False, markup=False)
        ended_well = True
        if keep:
            console.print(
                f"\nUI         {airflow.url}  user admin  password {airflow.password}", highlight=False
            )
            console.print("           `make down` ends it")
    finally:
        if not (keep and ended_well):
            left = steps.take_down(world)
            console.print("\nleft       " + (", ".join(left) if left else "no process of the demo"))
    console.print(f"done in {time.monotonic() - began:.0f} s")
    return 0


def _down(world: World, console: Console) -> int:
    left = steps.take_down(world)
    console.print(f"left: {', '.join(left)}" if left else "nothing of the demo is running")
    return 4 if left else 0


def _world(options: argparse.Namespace) -> World:
    home = options.home.absolute()
    if options.verb == "up" and options.model in LOCAL_MODELS:
        hub_url = f"http://127.0.0.1:{kept_port(home / 'hub-port')}"
        return World(home, options.model, options.scheme, hub_url, options.rows, options.sim)
    return World(home, options.model, options.scheme, rows=options.rows, sim=options.sim)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="demo", description="The whole pipeline on one machine without GPUs."
    )
    parser.add_argument("verb", choices=["up", "down"])
    parser.add_argument(
        "--home", type=Path, default=REPOSITORY / "var" / "demo", help="where everything is kept"
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help=f"{', '.join(LOCAL_MODELS)} or a repository on the hub"
    )
    parser.add_argument("--scheme", default="awq", help=", ".join(SCHEMES))
    parser.add_argument("--rows", type=int, help="ask only so many of the prompts")
    parser.add_argument("--sim", help=f"with simulated GPUs: {', '.join(SIMULATED_NODES)}")
    parser.add_argument("--keep", action="store_true", help="leave the UI up")
    return parser


if __name__ == "__main__":
    sys.exit(main())
