"""A pool that is killed or held, and what the keeper, `stop` and `reap` make of it."""

import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu import series
from benchmarks.gpu.deployment import Deployment
from benchmarks.gpu.kit import Stopwatch, memory_used_bytes
from benchmarks.gpu.traces import Traces
from benchmarks.gpu.workers import registered, startup, told
from tasks.node import processes
from tasks.node.processes import Process
from tasks.reap import as_facts, reap
from tasks.serving import leftovers, pools

Victim = Literal["api", "engine"]

_ENGINE = "VLLM::EngineCore"
_POLL_S = 0.1
_BACK_S = 420.0
_ORPHANS_AFTER_S = 2.0


def kill(at: Deployment, run_id: str, victim: Victim) -> dict[str, Any]:
    """SIGKILL of one process of a worker: what goes with it, and when the keeper has a worker ready again."""
    leader = _leader(at, run_id)
    session = processes.session_of(leader)
    target = leader if victim == "api" else _engine(session)
    before = memory_used_bytes()
    attempt = _worker(at, run_id)["attempt"]
    watch = Stopwatch()
    os.kill(target.pid, signal.SIGKILL)
    found = _follow(at, run_id, session, watch, attempt)
    return {
        "run": run_id,
        "victim": victim,
        "processes_of_the_server": len(session),
        "memory_before_bytes": before,
        **found,
        "startup": startup(at, run_id),
        "vllm_says": told(at.log(run_id, "worker-0")),
    }


def hang(at: Deployment, run_id: str) -> dict[str, Any]:
    """The health checks: an idle worker is asked, one whose engine is held is suspect, and well again after.

    Held for good, it is dead after `worker_silence_s` and replaced.
    """
    leader = _leader(at, run_id)
    session = processes.session_of(leader)
    engine = _engine(session)
    silence_s = at.settings.worker_silence_s
    tokens_before = _tokens(at, run_id)
    time.sleep(silence_s / 6 + 4.0)
    canary_tokens = _tokens(at, run_id) - tokens_before
    watch = Stopwatch()
    os.kill(engine.pid, signal.SIGSTOP)
    suspect_s, said = _until(at, run_id, "suspect", watch)
    os.kill(engine.pid, signal.SIGCONT)
    watch = Stopwatch()
    well_s, _ = _until(at, run_id, "ready", watch)
    attempt = _worker(at, run_id)["attempt"]
    watch = Stopwatch()
    os.kill(engine.pid, signal.SIGSTOP)
    replaced = _follow(at, run_id, session, watch, attempt)
    return {
        "run": run_id,
        "worker_silence_s": silence_s,
        "tokens_of_the_canary": canary_tokens,
        "suspect_after_s": suspect_s,
        "suspect_because": said,
        "well_again_after_s": well_s,
        "held_for_good": replaced,
    }


def kill_keeper_and_reap(at: Deployment, run_id: str) -> dict[str, Any]:
    """SIGKILL of the keeper: the servers must go with it, and reap must find and end what is left."""
    pool, _ = at.pool(run_id)
    assert pool.keeper is not None
    with at.ledger() as ledger:
        leaders = pools.leaders(pools.attempts(ledger, run_id))
    before = memory_used_bytes()
    was = leftovers.workers(run_id, leaders)
    watch = Stopwatch()
    os.kill(pool.keeper.pid, signal.SIGKILL)
    time.sleep(_ORPHANS_AFTER_S)
    orphans = leftovers.workers(run_id, leaders)
    memory_with_orphans = memory_used_bytes()
    waited_s = watch.lap_s()
    report = reap(at.settings)
    reap_s = watch.lap_s()
    left = leftovers.workers(run_id, leaders)
    restored = at.execute("restore", run_id)
    return {
        "run": run_id,
        "processes_before": len(was),
        "orphans_after_kill": len(orphans),
        "waited_s": waited_s,
        "memory_before_bytes": before,
        "memory_before_reap_bytes": memory_with_orphans,
        "reap_s": reap_s,
        "report": as_facts(report),
        "processes_after": len(left),
        "memory_after_bytes": memory_used_bytes(),
        "traces": Traces.now(at).since_begin(at),
        "restore": restored.message,
    }


def _follow(
    at: Deployment, run_id: str, session: list[Process], watch: Stopwatch, attempt: int
) -> dict[str, Any]:
    """Until a later attempt of the worker is ready: its states, the old processes, the memory."""
    seen: list[dict[str, Any]] = []
    gone_s = freed_s = ready_s = None
    first = lowest = memory_used_bytes() or 0
    while watch.total_s() < _BACK_S:
        alive = [process for process in session if process.is_alive()]
        used = memory_used_bytes() or 0
        lowest = min(lowest, used)
        worker = _worker(at, run_id)
        state = [worker["state"], worker["attempt"], len(alive)]
        if not seen or seen[-1]["state"] != state:
            seen.append({"at_s": watch.total_s(), "state": state, "memory_used_bytes": used})
        if gone_s is None and not alive:
            gone_s = watch.total_s()
        if freed_s is None and used < first / 2:
            freed_s = watch.total_s()
        if worker["state"] == "ready" and worker["attempt"] > attempt:
            ready_s = watch.total_s()
            break
        time.sleep(_POLL_S)
    return {
        "old_processes_gone_s": gone_s,
        "memory_free_s": freed_s,
        "lowest_memory_seen_bytes": lowest,
        "ready_again_s": ready_s,
        "seen": seen,
    }


def _until(at: Deployment, run_id: str, state: str, watch: Stopwatch) -> tuple[float | None, str]:
    """Seconds until the registry says that the worker is in `state`, and what it says of it."""
    while watch.total_s() < at.settings.worker_silence_s:
        worker = _worker(at, run_id)
        if worker["state"] == state:
            return watch.total_s(), worker["message"]
        time.sleep(_POLL_S)
    return None, "never"


def _tokens(at: Deployment, run_id: str) -> float:
    url = _worker(at, run_id)["url"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answered:
        return series.parse(answered.read().decode(), 0.0).values["generated_tokens"]


def _worker(at: Deployment, run_id: str) -> dict[str, Any]:
    pool, key = at.pool(run_id)
    assert pool.registry is not None
    return registered(pool.registry, key)[0]


def _leader(at: Deployment, run_id: str) -> Process:
    with at.ledger() as ledger:
        return pools.leaders(pools.attempts(ledger, run_id))[-1]


def _engine(session: list[Process]) -> Process:
    named = [one for one in session if _title(one).startswith(_ENGINE[:15])]  # as long as /proc tells it
    if not named:
        raise SystemExit("no process of the server is called an engine")
    return named[0]


def _title(process: Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""
