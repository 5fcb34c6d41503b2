"""`qwen-pipeline status`: what is held, running and done, for a person who looks in."""

from typing import Any

from tasks.cli.workers import as_text, read_log, workers_of
from tasks.errors import InputError, StageError
from tasks.gpu import drawing, inventory
from tasks.ledger import Ledger, leases
from tasks.settings import Settings
from tasks.stage_list import STAGES

_NEWEST = 10


def status(settings: Settings, run_id: str | None) -> tuple[dict[str, Any], str]:
    """This node's GPUs and the newest runs, or one run with its stages: as a document and as text."""
    with Ledger(settings.database_url(), settings.sql) as ledger:
        with ledger.transaction() as connection:
            runs = list(ledger.queries.newest_runs(connection, limit=_NEWEST))
        if run_id is None:
            gpus, drawn = _gpus(settings, ledger)
            document = {"node": settings.node, **gpus, "runs": runs}
            return document, f"node {settings.node}: {drawn}\n\n{_runs_as_text(runs)}"
        stages, workers = stages_of(ledger, run_id), workers_of(ledger, run_id)
    if not stages and run_id not in {run["run_id"] for run in runs}:
        raise InputError(
            f"there is no run {run_id!r} in the ledger; `qwen-pipeline status` lists those there are"
        )
    text = "\n".join([_stages_as_text(run_id, stages), *as_text(workers)])
    return {"run": run_id, "stages": stages, "workers": workers}, text


def worker_log(settings: Settings, run_id: str, worker_id: str, lines: int) -> tuple[dict[str, Any], str]:
    """The newest lines of a worker's log, or of `keeper`'s.

    Raises:
        InputError: there is no such run or worker, or its log cannot be read from here.
    """
    with Ledger(settings.database_url(), settings.sql) as ledger:
        text = read_log(ledger, run_id, worker_id, lines, settings)
    return {"run": run_id, "worker": worker_id, "lines": text.splitlines()}, text


def stages_of(ledger: Ledger, run_id: str) -> list[dict[str, Any]]:
    """The stages of a run that have been claimed, in the order of the pipeline."""
    with ledger.transaction() as connection:
        rows = list(ledger.queries.stages_of_run(connection, run_id=run_id))
    order = list(STAGES)
    return sorted(
        rows,
        key=lambda row: order.index(row["stage"]) if row["stage"] in order else len(order),
    )


def _gpus(settings: Settings, ledger: Ledger) -> tuple[dict[str, Any], str]:
    """A driver that fails must not hide the runs."""
    try:
        there = inventory.read(settings)
    except StageError as error:
        return {"gpus": [], "lost": {}, "simulated": False, "driver": str(error)}, str(error)
    held = leases.live_leases(ledger, settings.node)
    document = {
        "gpus": drawing.document(there, held),
        "lost": dict(there.lost),
        "simulated": there.simulated,
        "driver": there.driver_version,
    }
    return document, drawing.table(there, held)


def _runs_as_text(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "no run has been started yet"
    lines = [f"{'run':<44} {'tenant':<12} {'node':<12} {'started (UTC)':<17} state"]
    for run in runs:
        state = run["verdict"] or "open"
        lines.append(
            f"{run['run_id']:<44} {run['tenant']:<12} {run['node']:<12} {run['started_at']:%Y-%m-%d %H:%M}  {state}"
        )
    return "\n".join(lines)


def _stages_as_text(run_id: str, stages: list[dict[str, Any]]) -> str:
    lines = [f"run {run_id}"]
    for row in stages:
        state = row["outcome"] or "working"
        how_far = f"{row['done']}/{row['total']} {row['unit']}  " if row["done"] is not None else ""
        lines.append(f"  {row['stage']:<10} {state:<14} {how_far}{row['message'] or ''}".rstrip())
    return "\n".join(lines)
