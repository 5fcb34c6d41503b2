"""When a run stops by itself: its deadline and its tokens."""

import time

from tasks.batch.rows import Answers
from tasks.ledger import Run


def stop_at(run: Run) -> float:
    """The run's deadline, in seconds of Unix time."""
    return run.started_at.timestamp() + run.spec.limits.deadline_s


def tokens_left(run: Run, answers: Answers) -> int | None:
    """Tokens that the run may still spend; None without a limit."""
    most = run.spec.limits.max_tokens
    return None if most is None else max(0, most - answers.spent[run.run_id])


def reached(run: Run, answers: Answers) -> str | None:
    """The limit that the run has reached, for a person; None when it may start rows."""
    if time.time() >= stop_at(run):
        began = f"{run.started_at:%Y-%m-%d %H:%M} UTC"
        return f"its deadline (limits.deadline = {run.spec.limits.deadline} from {began})"
    if tokens_left(run, answers) == 0:
        return f"its token limit (limits.max_tokens = {run.spec.limits.max_tokens})"
    return None
