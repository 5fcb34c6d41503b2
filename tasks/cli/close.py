"""`qwen-pipeline close`: a run by hand is over. In Airflow the task `judge` says so."""

from typing import Any

from tasks.cli.status import stages_of
from tasks.ledger import Ledger, load
from tasks.ledger import close as close_run
from tasks.settings import Settings


def close(settings: Settings, run_id: str) -> tuple[dict[str, Any], str]:
    """End the run in the ledger: `done` when each of its stages is, else `failed`. Its release is free then, and the
    next `qwen-pipeline reap` ends what the run still has.

    Raises:
        InputError: there is no such run.
    """
    with Ledger(settings.database_url(), settings.sql) as ledger:
        load(ledger, run_id)
        unfinished = [row["stage"] for row in stages_of(ledger, run_id) if row["outcome"] != "done"]
        verdict = "failed" if unfinished else "done"
        close_run(ledger, run_id, verdict)
    because = f": {', '.join(unfinished)} did not succeed" if unfinished else ""
    return {
        "run": run_id,
        "verdict": verdict,
        "unfinished": unfinished,
    }, f"{run_id} is closed as {verdict}{because}"
