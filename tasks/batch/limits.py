"""When a run stops by itself: its deadline, its tokens, and those of its tenant."""

import time

from tasks.batch.rows import Answers
from tasks.ledger import Ledger, Run, quotas
from tasks.settings import Settings


def stop_at(run: Run) -> float:
    """From when on no row is started any more, in seconds of Unix time."""
    return run.winds_down_at.timestamp()


def tokens_left(run: Run, answers: Answers) -> int | None:
    """Tokens that the run may still spend; None without a limit."""
    most = run.spec.limits.max_tokens
    return None if most is None else max(0, most - answers.spent[run.run_id])


def reached(run: Run, answers: Answers, ledger: Ledger, settings: Settings) -> str | None:
    """The limit that the run has reached, for a person; None when it may start rows."""
    if time.time() >= stop_at(run):
        began = f"{run.due_from:%Y-%m-%d %H:%M} UTC"
        return (
            f"its deadline (limits.deadline = {run.spec.limits.deadline} from {began}; no row was started after "
            f"{run.winds_down_at:%H:%M} UTC)"
        )
    if tokens_left(run, answers) == 0:
        return f"its token limit (limits.max_tokens = {run.spec.limits.max_tokens})"
    quota = settings.quota_of(run.spec.tenant)
    if quotas.tokens_are_spent(ledger, run.spec.tenant, quota):
        assert quota is not None, "there is a quota, or it is not spent"
        return (
            f"the quota of tenant {run.spec.tenant} ({quota.tokens_per_day:,} tokens in 24 hours, "
            f"QWEN_PIPELINE_QUOTAS)"
        )
    return None
