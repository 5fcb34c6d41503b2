"""How a run stands that is near its deadline: what is done, what will not be, and what then happens."""

from datetime import UTC, datetime
from typing import Any

from tasks.cli.status import stages_of
from tasks.ledger import Ledger, Run
from tasks.ledger.runs import find
from tasks.settings import Settings


def outlook(settings: Settings, run_id: str) -> str | None:
    """A sentence or two; None for a run that has ended.

    Raises:
        Unavailable: the ledger does not answer.
    """
    with Ledger(settings.database_url(), settings.sql, patience_s=10.0) as ledger:
        run = find(ledger, run_id)
        if run is None:
            return f"run {run_id} is near its deadline and has not started"
        if run.verdict is not None:
            return None
        stages = {one["stage"]: one for one in stages_of(ledger, run_id)}
    now = datetime.now(UTC)
    minutes = (run.deadline - now).total_seconds() / 60
    due = f"run {run_id} of tenant {run.spec.tenant} is due at {run.deadline.astimezone(UTC):%H:%M} UTC"
    return f"{due}, in {minutes:.0f} min: {_how_far(run, stages, now)}"


def _how_far(run: Run, stages: dict[str, dict[str, Any]], now: datetime) -> str:
    asking = stages.get("run")
    if asking is None or asking["done"] is None:
        working = [name for name, one in stages.items() if one["outcome"] is None and name != "keeper"]
        at = f"it is at {working[0]}" if working else "it waits"
        return f"{at}, and no row is asked yet. {_what_then(run)}"
    finished, rows = asking["done"], asking["total"]
    if asking["outcome"] in ("done", "nothing to do"):
        return f"{finished:,} of {rows:,} rows are finished, and it publishes"
    said = f"{finished:,} of {rows:,} rows are finished"
    rows_per_s = (asking["detail"] or {}).get("rows_per_s") or 0.0
    left_s = max(0.0, (run.winds_down_at - now).total_seconds())
    missing = max(0, round(rows - finished - rows_per_s * left_s))
    if rows_per_s and not missing:
        return f"{said}, at {rows_per_s:,.1f} rows/s the rest is done in time"
    return f"{said}, at {rows_per_s:,.1f} rows/s some {missing:,} will not be started. {_what_then(run)}"


def _what_then(run: Run) -> str:
    at = f"No row is started after {run.winds_down_at.astimezone(UTC):%H:%M} UTC"
    if run.spec.limits.partial:
        return f"{at}; what is there then is published (limits.partial)"
    return f"{at}; if any is missing nothing is published, and the answers are kept (limits.partial is false)"
