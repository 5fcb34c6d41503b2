"""How a stage is executed, the same way for all of them (`tasks.stage_list`).

Claim it, end whoever acted for it before, take the node lock, plan, apply what differs, verify, finish the claim. So
it can be killed at any instruction and executed again.
"""

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from typing import Any, cast

from tasks import settings as deployment
from tasks.contract import Context, Outcome, StageModule, refuse_other_node
from tasks.errors import Fenced, InputError, Remedy, StageError, StageFailed
from tasks.ledger import Claim, Ledger, Run, leases, load, register, take
from tasks.ledger import close as close_run
from tasks.ledger.claims import facts_of
from tasks.ledger.runs import find as find_run
from tasks.ledger.runs import reckon_deadline_anew
from tasks.node import lock, processes
from tasks.settings import Settings
from tasks.spark import SparkSubmission
from tasks.spec import RunSpec, parse, times
from tasks.spec.freeze import resolve_dates, resolve_deadline
from tasks.stage_list import STAGES, Stage
from tasks.watch import watching

log = logging.getLogger(__name__)

_REASON_LENGTH = 500


@dataclass(frozen=True)
class Result:
    """What executing a stage did."""

    stage: str
    run: str
    epoch: int
    changed: bool
    """False when the world was as the spec asks already."""
    message: str
    facts: dict[str, Any]
    seconds: float


def freeze(ledger: Ledger, run_id: str, spec: RunSpec, at: datetime, settings: Settings) -> Run:
    """Start a run: resolve what is open in `spec` and record it; one that has started is `started_again`.

    Raises:
        InputError: a date placeholder is unknown, the model or its revision does not exist, or the run was
            started before with another spec.
        Unavailable: the hub did not answer.
    """
    known = find_run(ledger, run_id)
    if known is None:
        from tasks.weights.pin import pin

        # The business day is that of the schedule; its deadline is ahead, however late the run starts.
        resolved = resolve_deadline(resolve_dates(spec, at), datetime.now(UTC).astimezone(at.tzinfo))
        asked = spec.model_dump(mode="json")
        known = register(ledger, run_id, resolved, {"asked": asked, **pin(resolved, settings)})
    if changed := what_differs(known, spec):
        raise InputError(
            f"run {run_id!r} was started with another spec ({', '.join(changed)} differ), and a run keeps its "
            f"spec: give this one another name with --run"
        )
    return started_again(ledger, known, at)


def started_again(ledger: Ledger, run: Run, at: datetime) -> Run:
    """The run as it was frozen; where it had ended and its deadline is over, with one that is reckoned from now on.

    Args:
        at: with the time zone whose wall a time of day means.
    """
    now = datetime.now(UTC)
    if run.verdict is None or now < run.winds_down_at:
        return run
    asked = run.pins["asked"]["limits"]["deadline"]
    if times.is_moment(asked):
        log.warning(
            "run %s had ended, and its deadline is a moment of the past (%s): no device is taken and no row asked; "
            "for what is missing start another run with a later one",
            run.run_id,
            asked,
        )
        return run
    again = reckon_deadline_anew(ledger, run.run_id, times.resolve(asked, now.astimezone(at.tzinfo)))
    log.info(
        "run %s had ended, and its deadline (%s) was over: it is %s again from now on, which is %s",
        *(run.run_id, run.deadline.isoformat(timespec="minutes")),
        *(asked, again.deadline.isoformat(timespec="minutes")),
    )
    return again


def what_differs(run: Run, spec: RunSpec) -> list[str]:
    """The fields in which `spec` is not what the run was asked for."""
    # Read as a spec again: a field that came with an upgrade has its default in both.
    then = parse(run.pins["asked"], f"run {run.run_id}").model_dump(mode="json")
    now = spec.model_dump(mode="json")
    return sorted(name for name in now if now[name] != then[name])


def execute(
    name: str,
    run_id: str,
    *,
    settings: Settings | None = None,
    submit: Callable[[SparkSubmission], None] | None = None,
    comes_back: bool = False,
) -> Result:
    """Bring one stage of a run to where the spec wants it.

    Args:
        submit: how to run a Spark application; by default a child process.
        comes_back: whether the caller executes it again by itself after a failure that a retry can mend; the
            run keeps its devices for that. Otherwise they are left to the reaper when the stage fails, unless a
            pool of the run serves on them.

    Raises:
        StageError: see `tasks.errors`; the claim is then recorded as failed, with the message.
    """
    from tasks.batch.submit import submit_child

    settings = settings or deployment.current()
    stage = STAGES[name]
    began = time.monotonic()
    with Ledger(settings.database_url(), settings.sql) as ledger:
        run = load(ledger, run_id)
        if stage.lane == "devices":
            # Before the claim, which would end those of the host that is meant, its keeper's among them.
            refuse_other_node(run.spec, settings)
        claim, holders = take(ledger, run_id, name, stage.fences)
        lock_file = settings.locks / f"{run_id}-{stage.lane}.lock"
        purpose = f"stage {name} of run {run_id}"
        try:
            end_predecessors(run_id, stage, holders, settings)
            with (
                lock.held(lock_file, purpose, settings.lock_wait_s),
                watching(claim, settings.claim_watch_s),
            ):
                context = Context(run, claim, settings, submit or submit_child)
                try:
                    changed, outcome = _converge(cast(StageModule, import_module(stage.module)), context)
                except Exception as error:
                    if stage.brings_up and not (comes_back and _can_be_mended_by_a_retry(error)):
                        _abandon_lease(claim, settings, error)
                    raise
        except Exception as error:
            full = _full_disk(error, name)
            _record_failure(claim, full or error)
            if full is not None:
                raise full from error
            raise
        claim.finish("done" if changed else "nothing to do", outcome.message, outcome.facts)
    seconds = time.monotonic() - began
    return Result(
        name,
        run_id,
        claim.epoch,
        changed,
        outcome.message,
        outcome.facts,
        round(seconds, 2),
    )


def close(ledger: Ledger, run_id: str, *, succeeded: bool) -> str:
    """End the run in the ledger, where it is one; returns its verdict: `done`, `partial` or `failed`."""
    counted = facts_of(ledger, run_id, "reconcile") or {}
    verdict = "failed" if not succeeded else "partial" if counted.get("not_started") else "done"
    close_run(ledger, run_id, verdict)
    return verdict


def end_predecessors(run_id: str, stage: Stage, holders: list[processes.Process], settings: Settings) -> None:
    """End, on this host, the processes whose claims were just fenced, and their children.

    Without grace: every stage survives a kill, and a holder that is asked politely may act once more. Only the
    keeper is left to the stage itself, which ends it with what it parents.
    """
    keepers = processes.find(f"{run_id}/keeper", settings.deployment)
    holders = [holder for holder in holders if holder not in keepers]
    if holders:
        log.info("ending %d process(es) that acted for %s before", len(holders), stage.name)
    survivors = processes.end(holders, grace_s=0)
    for fenced in sorted(stage.fences - {"keeper"}):
        children = partial(processes.find, f"{run_id}/{fenced}", settings.deployment)
        survivors += processes.end_all(children, grace_s=0)
    if survivors:
        pids = ", ".join(str(process.pid) for process in survivors)
        raise StageFailed(
            f"process(es) {pids} acted for {stage.name} of run {run_id} before and do not end, not even after "
            f"SIGKILL: they hang in the kernel (a driver or a file system); look at /proc/PID/stack"
        )


def _converge(module: StageModule, context: Context) -> tuple[bool, Outcome]:
    plan = module.plan(context)
    changed = not plan.satisfied
    if changed:
        log.info("%s: %s", context.claim.stage, plan.reason)
        module.apply(plan, context)
    outcome = module.verify(context)
    if not changed:
        outcome = Outcome(f"nothing to do: {plan.reason}", outcome.facts)
    log.info("%s: %s", context.claim.stage, outcome.message)
    return changed, outcome


def _can_be_mended_by_a_retry(error: Exception) -> bool:
    return isinstance(error, StageError) and error.remedy is Remedy.RETRY


def _abandon_lease(claim: Claim, settings: Settings, error: Exception) -> None:
    """Nobody works under the run's lease now: the reaper need not wait until it expires.

    Unless a keeper lives: then a pool that was there before goes on serving under it.
    """
    if isinstance(error, Fenced) or processes.find(f"{claim.run_id}/keeper", settings.deployment):
        return
    try:
        lease = leases.lease_of(claim.ledger, claim.run_id, settings.node)
        if lease is not None and lease.state == "held":
            leases.abandon(claim, lease.lease_id, f"{claim.stage} failed: {_text(error)[:_REASON_LENGTH]}")
    except Exception:
        # The stage's own error matters more; the lease ends by its expiry.
        log.warning("the lease of run %s could not be marked as abandoned", claim.run_id, exc_info=True)


def _full_disk(error: Exception, stage: str) -> StageFailed | None:
    """A full disk is no defect, wherever it was met."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = f", at {error.filename}" if error.filename else ""
    return StageFailed(
        f"the disk is full{where}: nothing that {stage} was making is visible to others. Make room (old releases: "
        f"`qwen-pipeline releases`, `remove-release ID`) and execute it again"
    )


def _record_failure(claim: Claim, error: Exception) -> None:
    if isinstance(error, Fenced):
        return
    try:
        claim.finish("failed", _text(error), {})
    except Exception:
        # The stage's own error matters more; an unfinished claim is ended by the next one.
        log.warning(
            "the failure of %s could not be recorded in the ledger",
            claim.stage,
            exc_info=True,
        )


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, StageError) else f"{type(error).__name__}: {error}"
