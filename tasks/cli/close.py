"""`qwen-pipeline close`: a run by hand is over. In Airflow the task `judge` says so."""

from typing import Any

from tasks import stages
from tasks.cli.status import stages_of
from tasks.ledger import Ledger, load
from tasks.settings import Settings
from tasks.stage_list import STAGES


def close(settings: Settings, run_id: str) -> tuple[dict[str, Any], str]:
    """End the run in the ledger: `done` (or `partial`) when each of its stages is, else `failed`. Its release is free
    then, and the next `qwen-pipeline reap` ends what the run still has.

    Raises:
        InputError: there is no such run.
    """
    with Ledger(settings.database_url(), settings.sql) as ledger:
        load(ledger, run_id)
        unfinished = [
            row["stage"]
            for row in stages_of(ledger, run_id)
            if row["stage"] in STAGES and row["outcome"] not in ("done", "nothing to do")
        ]
        verdict = stages.close(ledger, run_id, succeeded=not unfinished)
    because = f": {', '.join(unfinished)} did not succeed" if unfinished else ""
    document = {"run": run_id, "verdict": verdict, "unfinished": unfinished}
    return document, f"{run_id} is closed as {verdict}{because}"
