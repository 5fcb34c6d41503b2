"""What is killed besides stages, as functions whose arguments survive JSON."""

from datetime import UTC, datetime
from typing import Any

from tests.kill.launcher import Action


def freezing(run_id: str, spec: dict[str, Any]) -> Action:
    """The start of a run."""
    return Action("freeze", "tests.kill.stage_actions:freeze", (run_id, spec))


def reaping() -> Action:
    """One round of the reaper."""
    return Action("reap", "tests.kill.stage_actions:reap", modules=("tasks.reap",))


def freeze(run_id: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Start the run; one that has started is as it was."""
    from tasks import settings as deployment
    from tasks import stages
    from tasks.ledger import Ledger
    from tasks.ledger.runs import find
    from tasks.spec import parse

    settings = deployment.current()
    with Ledger(settings.database_url(), settings.sql) as ledger:
        known = find(ledger, run_id) is not None
        run = stages.freeze(ledger, run_id, parse(spec), datetime(2026, 1, 2, tzinfo=UTC), settings)
    return {"changed": not known, "message": "frozen", "pins": run.pins}


def reap() -> dict[str, Any]:
    """End what outlived its lease."""
    from tasks import settings as deployment
    from tasks.reap import reap as reap_now

    report = reap_now(deployment.current())
    return {"changed": bool(report.reaped), "message": report.message}
