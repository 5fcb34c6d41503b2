"""The pool with the real vLLM on CPU and a tiny real checkpoint: one worker, because starts are dear.

`test_real_workers.py` has two, on a machine that is asked to (`REAL_WORKERS=1`).
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.node import processes
from tasks.serving import pools, ports
from tests.serving.pool_world import World, make_world, status_of, wait_for
from tests.serving.real_model import KEPT, tiny_qwen3

pytestmark = pytest.mark.real_vllm


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A run of the tiny Qwen3 with a CPU slot."""
    made = make_world(
        tmp_path,
        database_url,
        monkeypatch,
        worker_command=[],
        start_timeout_s=1800,
        # Kept for the next time: what vLLM learns about a model class costs it 10 s of a core.
        worker_environment={"VLLM_CACHE_ROOT": str(KEPT / "vllm-cache")},
    )
    serving = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_mb": 32,
    }
    made.add_run("run-1", cores=(0,), serving=serving)
    made.succeed("run-1", "convert", {"release_id": "tiny-qwen3", "path": str(tiny_qwen3())})
    try:
        yield made
    finally:
        made.close()


def test_a_pool_of_real_vllm_is_mended_and_ended(world: World) -> None:
    world.execute("start")
    lost = world.server(0)
    key = world.key()
    (url,) = [worker["url"] for worker in world.registry()["workers"]]
    assert status_of(f"{url}/v1/models", key) == 200
    assert status_of(f"{url}/v1/models") == 401
    seen = [Path(f"/proc/{process.pid}/cmdline").read_text() for process in world.processes()]

    # The engine is found by its marks, although vLLM gives it another title.
    engine = _engine(world)
    assert engine in processes.find("run-1/worker-0")
    assert engine in processes.session_of(lost)

    os.killpg(lost.pid, signal.SIGKILL)
    assert world.execute("start").changed
    assert not engine.is_alive()
    assert [worker["state"] for worker in world.registry()["workers"]] == ["ready"]

    # Without its keeper the API server ends by the kernel's hand, and leaves its engine behind.
    engine = _engine(world)
    keeper = world.pool().keeper
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGKILL)
    wait_for("the server ended", lambda: not world.server(0).is_alive())
    assert engine.is_alive(), "nobody has told the engine"

    all_urls = [f"http://127.0.0.1:{one.port}" for one in pools.attempts(world.ledger, "run-1")]
    stopped = world.execute("stop")
    assert stopped.changed
    assert stopped.seconds < 10
    assert world.processes() == []
    assert ports.occupied([int(url.rsplit(":", 1)[1]) for url in all_urls]) == []

    seen += [path.read_text() for path in world.settings.logs.rglob("*.log*")]
    for table in ("pool", "pool_worker", "pool_worker_change", "claim"):
        seen += [str(row) for row in world.rows(f"select * from {table}")]
    assert not any(key in text for text in seen)


def _engine(world: World) -> processes.Process:
    """The worker's process that holds the model."""
    for process in processes.find("run-1/worker-0"):
        if "EngineCore" in Path(f"/proc/{process.pid}/cmdline").read_text():
            return process
    raise AssertionError("the worker has no engine")
