"""`qwen-pipeline report`: rows, tokens and time of a run, from the ledger."""

from datetime import UTC
from typing import Any

import yaml

from tasks.cli.status import stages_of
from tasks.ledger import Ledger, load
from tasks.settings import Settings

_COUNTS = (
    "answered",
    "failed",
    "not_started",
    "prompt_tokens",
    "completion_tokens",
    "rows_per_s",
)


def report(settings: Settings, run_id: str) -> tuple[dict[str, Any], str]:
    """What the run has done so far: as a document and as text.

    Raises:
        InputError: there is no such run.
    """
    with Ledger(settings.database_url(), settings.sql) as ledger:
        run = load(ledger, run_id)
        stages = stages_of(ledger, run_id)
    facts = {row["stage"]: row["facts"] or {} for row in stages}
    seconds = {
        row["stage"]: round((row["ended_at"] - row["claimed_at"]).total_seconds(), 1)
        for row in stages
        if row["ended_at"] is not None
    }
    counts = {name: facts.get("run", {}).get(name) for name in _COUNTS}
    document = {
        "run": run_id,
        "verdict": run.verdict or "open",
        "started": f"{run.started_at:%Y-%m-%d %H:%M} UTC",
        "deadline": f"{run.deadline.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
        "release": run.pins.get("release_id"),
        "batch": facts.get("prepare", {}).get("batch_id"),
        "rows": facts.get("prepare", {}).get("rows"),
        **counts,
        "output": facts.get("publish", {}).get("output"),
        "seconds": seconds,
        "spec": yaml.safe_dump(run.spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
    }
    lines = [f"run {run_id}: {document['verdict']}"]
    lines += [
        f"  {name:<18} {value}"
        for name, value in document.items()
        if name not in ("run", "verdict", "seconds", "spec")
    ]
    lines += [
        "  time by stage",
        *(f"    {stage:<12} {value:>8.1f} s" for stage, value in seconds.items()),
    ]
    return document, "\n".join(lines)
