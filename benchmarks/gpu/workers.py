"""Starting and stopping a pool by the project's own stages, each timed and each looked at afterwards."""

import re
import time
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.deployment import Deployment
from benchmarks.gpu.kit import Stopwatch, memory_used_bytes, processes_on_gpu
from benchmarks.gpu.traces import Traces
from tasks.cli.workers import workers_of
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
        "startup": startup(at, run_id),
        "memory_used_bytes": memory_used_bytes(),
        "cache_bytes_before": before,
        "cache_bytes_after": _size(cache),
        "vllm_says": told(at.log(run_id, "worker-0")),
    }


def startup(at: Deployment, run_id: str) -> dict[str, Any]:
    """What the ledger holds of the newest start of the run's worker: timeline, first requests, cache."""
    with at.ledger() as ledger:
        (worker,) = workers_of(ledger, run_id)
    return {"attempt": worker["attempt"], **(worker["startup"] or {})}


def stop(at: Deployment, run_id: str) -> dict[str, Any]:
    """Stages stop and restore, and what is left on the GPU."""
    before = memory_used_bytes()
    with at.ledger() as ledger:
        leaders = pools.leaders(pools.attempts(ledger, run_id))
        pool = pools.open_pool(ledger, run_id)
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
        "memory_before_the_pool_bytes": sum(pool.memory_before.values()) if pool else None,
        "memory_before_bytes": before,
        "memory_after_bytes": after,
        "processes_on_gpu": processes_on_gpu(),
        "traces": Traces.now(at).since_begin(at),
        "says": stopped.message,
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


def told(log: Path) -> list[str]:
    """What the log of a worker says of its start, as far as it has numbers."""
    text = log.read_text(errors="replace") if log.exists() else ""
    found = [match[0][:200] for match in _TOLD.finditer(text)]
    return list(dict.fromkeys(line for line in found if re.search(r"\d", line)))[-40:]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
