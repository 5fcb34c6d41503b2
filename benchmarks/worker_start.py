"""Where the time of a worker's start goes, with cold and with warm compile caches.

    .venv/bin/python -m benchmarks.worker_start RELEASE [cpu | GPU-UUID] [ROUNDS]

Starts the real vLLM as the keeper does, without a ledger, first with an empty cache and then with what that start
left, ROUNDS times. Prints seconds from the spawn to each event (medians): imported, engine process, begins to
load, weights loaded, compiled (where anything is), engine ready, listens, ready (after the first requests). Beside
them the processor time of all its processes until it was ready, which says the same on a busy machine, and the load.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tasks import settings as deployment
from tasks.node.processes import Process
from tasks.serving import leftovers, prewarm, probes
from tasks.serving.launch import Slot
from tasks.serving.server import Job
from tasks.serving.worker import Worker
from tasks.spec import Serving

_POLL_S = 0.2


class _Notes:
    """Stands in for the ledger's queries: keeps what each was given."""

    def __init__(self) -> None:
        self.startup: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        def note(_: Any, **values: Any) -> None:
            if name == "worker_warmed":
                self.startup = values["startup"].obj

        return note


async def _start(release: Path, slot: Slot, serving: Serving) -> dict[str, Any]:
    notes = _Notes()
    shapes = prewarm.Shapes(64, 128, 16, serving.sequences, serving.sequences, None)
    job = Job(
        "bench.1", "bench", "bench", release, serving, os.urandom(16).hex(), deployment.current(), shapes
    )

    def record(write: Any) -> "asyncio.Future[None]":
        write(None)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async with probes.session(job.key) as client:
        worker = Worker(0, slot, job, client=client, record=record, queries=notes, turns=asyncio.Semaphore(1))
        tending = asyncio.create_task(worker.tend())
        try:
            while notes.startup is None and worker.given_up is None:
                await asyncio.sleep(_POLL_S)
            cpu_s = sum(_cpu_s(one) for one in leftovers.workers(job.run_id))
        finally:
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)
            await worker.stop()
    if notes.startup is None:
        raise SystemExit(worker.message)
    notes.startup["timeline"]["cpu"] = cpu_s
    return notes.startup


def _cpu_s(process: Process) -> float:
    """Of one process and of its children that have ended, from /proc/PID/stat (proc(5))."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def measure(release: Path, device: str, rounds: int) -> dict[str, Any]:
    """Medians over `rounds` pairs of a cold and a warm start, in seconds."""
    serving = Serving(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=512)
    slot = Slot("slot", "cpu", cores=(0,)) if device == "cpu" else Slot("slot", "gpus", uuids=(device,))
    seen: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as home:
            os.environ["QWEN_PIPELINE_HOME"] = home
            deployment.current.cache_clear()
            for kind in seen:
                startup = asyncio.run(_start(release, slot, serving))
                assert startup["compile_cache"]["was_warm"] is (kind == "warm"), startup["compile_cache"]
                seen[kind].append(startup["timeline"])
    medians: dict[str, Any] = {
        kind: {
            event: round(statistics.median(one[event] for one in timelines if event in one), 1)
            for event in timelines[0]
        }
        for kind, timelines in seen.items()
    }
    return {**medians, "rounds": rounds, "load": round(os.getloadavg()[0], 1)}


if __name__ == "__main__":
    _, folder, *others = sys.argv
    print(
        json.dumps(
            measure(
                Path(folder).resolve(),
                others[0] if others else "cpu",
                int(others[1]) if len(others) > 1 else 1,
            )
        )
    )
