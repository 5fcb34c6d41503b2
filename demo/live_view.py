"""What the demo shows while a run works: one line a stage, not a wall of log.

On a terminal the table is drawn anew twice a second; elsewhere a line is printed when a stage changes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from demo.airflow_api import AirflowApi, DagRun, TaskInstance
from tasks.cli.status import stages_of
from tasks.ledger import Ledger
from tasks.stage_list import STAGES

TASKS = ("freeze", *STAGES, "judge")
"""In the order of the story."""

_COLOURS = {
    "success": "green",
    "running": "yellow",
    "failed": "red",
    "upstream_failed": "red",
    "skipped": "red",
}
_POLL_S = 1.0
"""Each look is two requests of an API server that shares its cores with the run."""


@dataclass(frozen=True)
class Line:
    """One stage, as shown."""

    name: str
    state: str
    elapsed_s: float | None
    how_far: str
    message: str


def follow(api: AirflowApi, ledger: Ledger, dag_id: str, run_id: str, console: Console) -> DagRun:
    """Show the run until it has finished; returns how it ended."""
    shown: dict[str, str] = {}
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            run = api.dag_run(dag_id, run_id)
            lines = read_lines(api, ledger, dag_id, run_id)
            if console.is_terminal:
                live.update(_table(run, lines), refresh=True)
            else:
                _print_changes(lines, shown, console.print)
            if run.finished:
                return run
            time.sleep(_POLL_S)


def read_lines(api: AirflowApi, ledger: Ledger, dag_id: str, run_id: str) -> list[Line]:
    """The run's stages now: states from Airflow, progress and messages from the ledger."""
    instances = {found.task_id: found for found in api.task_instances(dag_id, run_id)}
    recorded = {row["stage"]: row for row in stages_of(ledger, run_id)}
    return [_line(name, instances.get(name), recorded.get(name)) for name in TASKS]


def _line(name: str, instance: TaskInstance | None, row: dict[str, Any] | None) -> Line:
    state = (instance.state if instance else None) or "waiting"
    elapsed_s = None
    if instance and instance.start:
        elapsed_s = ((instance.end or datetime.now(UTC)) - instance.start).total_seconds()
    how_far, message = "", ""
    if row is not None:
        message = row["message"] or ""
        if row["total"] and row["ended_at"] is None:
            how_far = f"{row['done']:,}/{row['total']:,} {row['unit']}"
            eta_s = row["detail"].get("eta_s")
            how_far += f", {eta_s:.0f} s left" if eta_s is not None else ""
    return Line(name, state, elapsed_s, how_far, message)


def _table(run: DagRun, lines: list[Line]) -> Table:
    table = Table(title=f"run {run.run_id}: {run.state}", title_justify="left", expand=False)
    table.add_column("stage")
    table.add_column("state")
    table.add_column("elapsed", justify="right")
    table.add_column("progress, or what was found", overflow="ellipsis", no_wrap=True, max_width=90)
    for line in lines:
        colour = _COLOURS.get(line.state, "dim")
        table.add_row(line.name, f"[{colour}]{line.state}[/]", _seconds(line), line.how_far or line.message)
    return table


def _print_changes(lines: list[Line], shown: dict[str, str], say: Callable[[str], None]) -> None:
    for line in lines:
        # A fifth of the way is worth a line; each row is not.
        done, _, rest = line.how_far.partition("/")
        total = rest.split(" ")[0].replace(",", "")
        fifth = int(done.replace(",", "")) * 5 // int(total) if total else 0
        key = f"{line.state} {fifth}"
        if line.state == "waiting" or shown.get(line.name) == key:
            continue
        shown[line.name] = key
        say(f"{line.name:<10} {line.state:<16} {_seconds(line):>8}  {line.how_far or line.message}".rstrip())


def _seconds(line: Line) -> str:
    return "" if line.elapsed_s is None else f"{line.elapsed_s:.0f} s"
