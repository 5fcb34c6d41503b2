"""Stage `start`: a pool of ready workers, or the one that is there mended.

The world is the keeper (is it alive, does its registry answer for our pool) and its workers. A keeper that
lives is adopted and replaces its dead workers itself; one that died leaves servers that nobody parents: they
are ended, and a new keeper with a new pool is started. A start that fails leaves no pool.
"""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks import pool_key
from tasks.contract import Context, Outcome
from tasks.errors import Fenced, Remedy, StageError, StageFailed, Unavailable
from tasks.ledger import take
from tasks.node import processes
from tasks.serving import (
    device_memory,
    diagnosis,
    flags,
    given,
    keeper_process,
    leftovers,
    log_files,
    pools,
    probes,
    standing,
)
from tasks.serving.diagnosis import Diagnosis
from tasks.serving.pools import Pool, Wanted

log = logging.getLogger(__name__)

_POLL_S = 0.25
_LONGEST_POLL_S = 2.0
_POLL_PART = 0.02
_PATIENCE = 1.0
"""With a worker that is full or being replaced, in times of `canary_timeout_s`."""
_KEEPER_UP_S = 120.0
"""A keeper is up within a second or two, on a machine that has nothing else to do."""
_LAST_LINES = 4
_LINE_LENGTH = 240
_LONGER_S = 86400.0
"""A pool is no use beyond its run's deadline; this much more is left for a run that is started again."""
_ASKS = 20
_ASKS_TO_PLAN = 3
"""A keeper on a busy machine may answer late, and replacing it costs a whole start."""
_NO_POOL = {"pool_id": None, "registry": None, "model": None, "workers": 0}


@dataclass(frozen=True)
class Plan:
    """What is missing from the pool."""

    reason: str
    satisfied: bool = False
    wanted: Wanted | None = None
    """None where no pool is wanted."""
    keeper: Pool | None = None
    """A live keeper whose pool is as wanted; its workers may need mending."""


def plan(context: Context) -> Plan:
    """What differs between the pool that is wanted and the one that is there.

    Raises:
        InputError: a flag in serving.extra_args does not exist, or a stage before this one has not been run.
        StageFailed: the devices were given back since they were provisioned.
    """
    if (idle := given.why_no_pool(context)) is not None:
        return Plan(f"{idle}, so no model is loaded", satisfied=True)
    flags.check(context.run.spec.serving.extra_args, context.settings.serving_flags)
    wanted = given.wanted(context)
    if (over := given.why_lease_is_over(wanted, context)) is not None:
        return Plan(f"hold lease {wanted.lease_id} again, which {over}, and start anew", wanted=wanted)
    there = pools.open_pool(context.claim.ledger, context.run.run_id)
    workers = len(wanted.slots)
    if there is None or there.wanted != wanted or there.keeper is None or not there.keeper.is_alive():
        left = pools.processes_of(context.claim.ledger, context.run.run_id)
        first = f"end {len(left)} process(es) of a pool that is not wanted any more, then " if left else ""
        return Plan(f"{first}start {workers} worker(s) of {wanted.release_id}", wanted=wanted)
    try:
        now = standing.ask(there, _key(context, there), tries=_ASKS_TO_PLAN)
    except probes.NoAnswer as error:
        return Plan(f"the keeper of pool {there.pool_id} is replaced: {error}", wanted=wanted)
    if now.draining:
        return Plan(f"pool {there.pool_id} is ending, so another is started", wanted=wanted)
    if now.unready:
        return Plan(f"wait for the keeper to replace {', '.join(now.unready)}", wanted=wanted, keeper=there)
    return Plan(f"all {workers} worker(s) of pool {there.pool_id} are ready", True, wanted, there)


def apply(plan: Plan, context: Context) -> None:
    """Start or mend the pool, and wait until every worker is ready.

    Raises:
        StageFailed, InputError, Unavailable: a worker was given up, and the message has its log's lines; or
            the keeper ended.
    """
    assert plan.wanted is not None, "a plan without a pool is satisfied"
    with _nothing_left_when_it_fails(context):
        _await_workers(plan.keeper or _launch(plan.wanted, context), context)


def verify(context: Context) -> Outcome:
    """Every worker that was not given up answers a chat with the pool's key, and turns away who has none.

    Raises:
        StageFailed: one serves strangers, or does not want a chat.
        Unavailable: one does not answer, not even after a while, or the pool has just ended.
    """
    if given.why_no_pool(context) is not None:
        return Outcome("no pool is needed", _NO_POOL)
    there = pools.open_pool(context.claim.ledger, context.run.run_id)
    if there is None or there.registry is None:
        raise Unavailable(f"the pool ended as soon as it was ready{_last_words(context)}")
    # A pool that served before this try goes on: its keeper replaces the worker, and a later try finds it well.
    with _nothing_left_when_it_fails(context) if _is_of_this_try(there, context) else nullcontext():
        workers = _prove(there, context)
    facts = {
        "pool_id": there.pool_id,
        "registry": there.registry,
        "model": there.wanted.release_id,
        "workers": workers,
    }
    wanted = len(there.wanted.slots)
    fewer = "" if workers == wanted else f" ({wanted - workers} of {wanted} were given up: see their logs)"
    return Outcome(f"{workers} worker(s) serve {there.wanted.release_id}{fewer}", facts)


def _prove(pool: Pool, context: Context) -> int:
    """How many workers answer. One that is full, or is being replaced, is asked again for a while."""
    timeout_s = context.settings.canary_timeout_s
    deadline = time.monotonic() + _PATIENCE * timeout_s
    while True:
        try:
            return standing.prove(pool, _key(context, pool), timeout_s)
        except probes.Unfit as error:
            raise StageFailed(f"the pool is up but does not serve: {error}") from None
        except probes.NoAnswer as error:
            lives = pool.keeper is not None and pool.keeper.is_alive()
            if not lives or time.monotonic() >= deadline:
                raise Unavailable(f"the pool was up and does not serve now: {error}") from None
        time.sleep(_LONGEST_POLL_S)


def _is_of_this_try(pool: Pool, context: Context) -> bool:
    """A pool is named by the epoch of its keeper's claim, which is newer than that of the `start` that made it."""
    return int(pool.pool_id.rpartition(".")[2]) > context.claim.epoch


@contextmanager
def _nothing_left_when_it_fails(context: Context) -> Iterator[None]:
    """Airflow does not tear down what failed to set up."""
    try:
        yield
    except Fenced:
        raise
    except Exception as error:
        try:
            _end_pool(context, f"start failed: {error}")
        except StageError as second:
            log.warning("what start left is not ended yet; stop and reap will: %s", second)
        raise


def _launch(wanted: Wanted, context: Context) -> Pool:
    """End what is left of an older pool and start a keeper; it is in the ledger before it exists."""
    run_id, ledger, settings = context.run.run_id, context.claim.ledger, context.settings
    _end_pool(context, "replaced")
    given.hold_lease(wanted, context)
    keeping, holders = take(ledger, run_id, "keeper", frozenset({"keeper"}))
    processes.end(holders, grace_s=0)
    pool_id = f"{run_id}.{keeping.epoch}"
    uuids = [uuid for slot in wanted.slots for uuid in slot.uuids]
    before = {uuid: use.used_bytes for uuid, use in device_memory.read(uuids, settings).items()}
    pools.intend(keeping, pool_id, settings.node, wanted, before)
    secrets = {}
    if settings.ledger_url is not None:
        secrets["QWEN_PIPELINE_LEDGER_URL"] = settings.ledger_url.get_secret_value()
    keeper_log = _keeper_log(context)
    try:
        log_files.begin_anew(keeper_log, settings.log_keep)
        started = keeper_process.start(
            pool_id,
            [sys.executable, "-m", "tasks.serving.keeper", "--pool", pool_id, "--epoch", str(keeping.epoch)],
            processes.environment(f"{run_id}/keeper", secrets),
            keeper_log,
            settings,
            _until_deadline_s(context) + settings.start_timeout_s + _LONGER_S,
        )
    except OSError as error:
        raise StageFailed(f"the keeper of the workers cannot be started: {error}") from None
    deadline = time.monotonic() + _KEEPER_UP_S
    while True:
        pool = pools.load(ledger, pool_id)
        if pool is not None and pool.registry is not None:
            return pool
        if (how := started.ended()) is not None:
            raise diagnosis.of_log("the keeper", keeper_log, how).as_error()
        if time.monotonic() > deadline:
            raise Unavailable(f"the keeper did not come up in {_KEEPER_UP_S:.0f} s{_last_words(context)}")
        time.sleep(_POLL_S)


def _until_deadline_s(context: Context) -> float:
    return max(0.0, (context.run.deadline - datetime.now(UTC)).total_seconds())


def _await_workers(pool: Pool, context: Context) -> None:
    """Until all are ready, or enough are and the others given up.

    Ends: the keeper bounds every start of a worker, and their number.
    """
    key, total = _key(context, pool), len(pool.wanted.slots)
    least = min(context.run.spec.serving.min_workers, total)
    shown = -1
    told: set[str] = set()
    began = time.monotonic()
    try:
        standing.try_again(pool, key)
        while True:
            now = standing.ask(pool, key, tries=_ASKS)
            ready = total - len(now.unready)
            if ready != shown:
                context.claim.progress(ready, total, "workers")
                shown = ready
            says = {f"{one['worker_id']} is {one['state']}: {one['message']}" for one in now.workers}
            for line in sorted(says - told):
                log.info("%s", line)
            told = says
            given_up = [worker for worker in now.workers if worker["given_up"]]
            if total - len(given_up) < least:
                raise _why_given_up(given_up, total)
            if ready + len(given_up) == total:
                _warn_of(given_up)
                return
            # Who has waited for minutes need not know to the quarter of a second.
            time.sleep(min(_LONGEST_POLL_S, max(_POLL_S, (time.monotonic() - began) * _POLL_PART)))
    except probes.NoAnswer as error:
        lives = pool.keeper is not None and pool.keeper.is_alive()
        what = f"hangs ({error})" if lives else "ended, or was killed, before its workers were ready"
        raise Unavailable(f"the keeper of pool {pool.pool_id} {what}{_last_words(context)}") from None


def _why_given_up(given_up: Sequence[dict[str, Any]], total: int) -> StageError:
    first = given_up[0]
    remedy = Remedy(first["given_up"]["remedy"])
    others = f"; {len(given_up)} of {total} workers were" if total > 1 else ""
    message = f"{first['message']}\n(given up after start {first['attempt']}{others})"
    return Diagnosis(first["given_up"]["kind"], remedy, message).as_error()


def _warn_of(given_up: Sequence[dict[str, Any]]) -> None:
    for worker in given_up:
        log.warning("the run goes on without %s: %s", worker["worker_id"], worker["message"])


def _end_pool(context: Context, reason: str) -> None:
    """End whatever there is of a pool of this run, and write that down."""
    run_id, settings, ledger = context.run.run_id, context.settings, context.claim.ledger
    there = pools.open_pool(ledger, run_id)
    attempts = pools.attempts(ledger, run_id)
    survivors = leftovers.end(
        run_id,
        pools.leaders(attempts),
        there.keeper if there else None,
        keeper_grace_s=settings.drain_s + settings.stop_grace_s,
        held=pools.shared_memory(attempts),
    )
    if survivors:
        pids = ", ".join(str(process.pid) for process in survivors)
        raise StageFailed(
            f"process(es) {pids} of the pool of run {run_id} do not end, not even after SIGKILL"
        )
    if there is not None:
        pools.end(context.claim, there.pool_id, reason)


def _key(context: Context, pool: Pool) -> str:
    return pool_key.derive(context.settings.secret(), pool.pool_id)


def _keeper_log(context: Context) -> Path:
    return context.settings.logs / context.run.run_id / "keeper.log"


def _last_words(context: Context) -> str:
    """The end of the keeper's log, for an error that it explains better."""
    keeper_log = _keeper_log(context)
    lines = "".join(f"\n    {line[:_LINE_LENGTH]}" for line in log_files.tail(keeper_log, _LAST_LINES))
    return f"; its log is {keeper_log}" + (f" and ends:{lines}" if lines else ", and is empty")
