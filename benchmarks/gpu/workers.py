"""Starting, killing and stopping a pool by the project's own stages, each timed and each looked at afterwards."""

import os
import re
import signal
import time
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.deployment import Deployment
from benchmarks.gpu.kit import Stopwatch, memory_used_bytes, processes_on_gpu
from tasks.gpu import inventory
from tasks.reap import as_facts, reap
from tasks.serving import leftovers, pools

_STATE = re.compile(r"^(?P<at>\S+ \S+) INFO \S+: worker-0: (?P<state>[a-z]+):")

_TOLD = re.compile(
    r"(?:init engine|Loading weights took|Model loading took|torch\.compile|Graph capturing|GPU KV cache size|"
    r"Maximum concurrency|Available KV cache|Warming up|warm.?up|Dynamo|autotun|Compiling a graph).*"
)
"""What vLLM's log says of its own start."""


def start(at: Deployment, run_id: str, model: str, serving: dict[str, Any]) -> dict[str, Any]:
    """Stages provision and start of a new run."""
    watch = Stopwatch()
    cache = at.settings.home / "cache"
    before = _size(cache)
    at.add_run(run_id, model, serving)
    provisioned = at.execute("provision", run_id)
    started = at.execute("start", run_id)
    again = at.execute("start", run_id)
    return {
        "run": run_id,
        "model": model,
        "serving": serving,
        "provision_s": provisioned.seconds,
        "start_s": started.seconds,
        "start_again_s": again.seconds,
        "start_again_changed": again.changed,
        "seconds": watch.total_s(),
        "states": _states(at.log(run_id, "keeper")),
        "memory_used_bytes": memory_used_bytes(),
        "cache_bytes_before": before,
        "cache_bytes_after": _size(cache),
        "vllm_says": _told(at.log(run_id, "worker-0")),
    }


def stop(at: Deployment, run_id: str) -> dict[str, Any]:
    """Stages stop and restore, and what is left on the GPU."""
    before = memory_used_bytes()
    with at.ledger() as ledger:
        leaders = pools.leaders(pools.attempts(ledger, run_id))
    was = len(leftovers.workers(run_id, leaders))
    stopped = at.execute("stop", run_id)
    left = len(leftovers.workers(run_id, leaders)) + len(leftovers.keepers(run_id))
    after = memory_used_bytes()
    again = at.execute("stop", run_id)
    restored = at.execute("restore", run_id)
    return {
        "run": run_id,
        "stop_s": stopped.seconds,
        "stop_again_s": again.seconds,
        "stop_again_changed": again.changed,
        "restore_s": restored.seconds,
        "processes_before": was,
        "processes_after": left,
        "memory_before_bytes": before,
        "memory_after_bytes": after,
        "processes_on_gpu": processes_on_gpu(),
        "says": stopped.message,
    }


def kill_api_server(at: Deployment, run_id: str, patience_s: float = 420.0) -> dict[str, Any]:
    """SIGKILL of the API server alone: what it leaves behind, and when the keeper has a worker ready again."""
    with at.ledger() as ledger:
        leader = pools.leaders(pools.attempts(ledger, run_id))[-1]
    pool, key = at.pool(run_id)
    assert pool.registry is not None
    session = leftovers.session_of(leader)
    before = memory_used_bytes()
    watch = Stopwatch()
    os.kill(leader.pid, signal.SIGKILL)
    seen: list[dict[str, Any]] = []
    freed_s = ready_s = None
    lowest = before
    while watch.total_s() < patience_s:
        alive = [process for process in session if process.is_alive()]
        used = memory_used_bytes()
        lowest = min(lowest, used) if lowest is not None and used is not None else lowest
        worker = registered(pool.registry, key)[0]
        state = (worker["state"], worker["attempt"], len(alive))
        if not seen or seen[-1]["state"] != list(state):
            seen.append({"at_s": watch.total_s(), "state": list(state), "memory_used_bytes": used})
        if freed_s is None and not alive:
            freed_s = watch.total_s()
        if worker["state"] == "ready" and worker["attempt"] > 1:
            ready_s = watch.total_s()
            break
        time.sleep(0.1)
    return {
        "run": run_id,
        "processes_of_the_server": len(session),
        "memory_before_bytes": before,
        "lowest_memory_seen_bytes": lowest,
        "old_processes_gone_s": freed_s,
        "ready_again_s": ready_s,
        "seen": seen,
        "vllm_says": _told(at.log(run_id, "worker-0")),
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
    time.sleep(2.0)
    orphans = leftovers.workers(run_id, leaders)
    memory_with_orphans = memory_used_bytes()
    waited_s = watch.lap_s()
    report = reap(at.settings)
    reap_s = watch.lap_s()
    left = leftovers.workers(run_id, leaders)
    after = memory_used_bytes()
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
        "memory_after_bytes": after,
        "restore": restored.message,
    }


def read_inventory(at: Deployment) -> dict[str, Any]:
    """What the project reads of this node."""
    found = inventory.read(at.settings)
    return {
        "describe": found.describe(),
        "gpus": [
            {"index": gpu.index, "name": gpu.name, "memory_bytes": gpu.memory_bytes, "mig_mode": gpu.mig_mode}
            for gpu in found.gpus
        ],
        "driver_version": found.driver_version,
        "cuda_version": found.cuda_version,
    }


def registered(registry: str, key: str) -> list[dict[str, Any]]:
    """The pool's workers, as its keeper says."""
    import json

    request = urllib.request.Request(f"{registry}/v1/pool", headers={"Authorization": f"Bearer {key}"})
    for _ in range(50):
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return list(json.load(answer)["workers"])
        except urllib.error.URLError:
            time.sleep(0.1)
    raise SystemExit(f"the registry {registry} does not answer")


def _states(log: Path) -> list[dict[str, Any]]:
    """When the worker was in which state, in seconds since the keeper's first line."""
    lines = log.read_text().splitlines() if log.exists() else []
    found = [match for line in lines if (match := _STATE.match(line))]
    if not found:
        return []
    moments = [datetime.strptime(match["at"], "%Y-%m-%d %H:%M:%S,%f") for match in found]
    return [
        {"at_s": round((moment - moments[0]).total_seconds(), 2), "state": match["state"]}
        for moment, match in zip(moments, found, strict=True)
    ]


def _told(log: Path) -> list[str]:
    text = log.read_text(errors="replace") if log.exists() else ""
    found = [match[0][:200] for match in _TOLD.finditer(text)]
    return list(dict.fromkeys(line for line in found if re.search(r"\d", line)))[-40:]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
