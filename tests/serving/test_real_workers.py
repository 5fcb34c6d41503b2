"""What is promised of workers, with the real vLLM on CPU: every way to die, and every start that cannot succeed.

Takes some ten minutes of two cores, so it runs when asked for: `REAL_WORKERS=1 pytest -s`; `REAL_WORKERS=long`
also waits for a lease to expire. What is seen is printed. The same with a stand-in for vLLM is in test_pool.py.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import settings as deployment
from tasks.errors import StageError
from tasks.node.processes import Process
from tasks.reap import reap
from tasks.serving import ports, probes, scratch
from tests.serving.forwarder import Forwarder
from tests.serving.pool_world import World, make_world, status_of, wait_for
from tests.serving.real_model import KEPT, tiny_qwen3

pytestmark = [
    pytest.mark.real_vllm,
    pytest.mark.timeout(3600),
    pytest.mark.skipif("REAL_WORKERS" not in os.environ, reason="REAL_WORKERS=1 asks for these minutes"),
]

SERVING = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256, "kv_cache_memory_mb": 32}


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A run of a tiny Qwen3 with one CPU slot."""
    made = make_world(
        tmp_path,
        database_url,
        monkeypatch,
        worker_command=[],
        start_timeout_s=900,
        worker_silence_s=30,
        worker_attempts=9,  # it is killed several times in a row
        stop_grace_s=10.0,
        worker_environment={"VLLM_CACHE_ROOT": str(KEPT / "vllm-cache")},
    )
    made.add_run("run-1", cores=(0,), serving=SERVING)
    made.succeed("run-1", "convert", {"release_id": "tiny-qwen3", "path": str(tiny_qwen3())})
    try:
        yield made
    finally:
        made.close()


def see(what: str, **seen: Any) -> None:
    print(json.dumps({"seen": what, **seen}), flush=True)


def nothing_is_left(world: World) -> None:
    assert world.processes() == []
    known = [one["port"] for one in world.rows("select lower(ports) as port from pool_worker")]
    assert ports.occupied(known) == []
    assert not scratch.of_run("run-1").exists()
    for row in world.rows("select shared_memory from pool_worker"):
        assert not any(os.path.exists(path) for path in row["shared_memory"])


def ready(world: World) -> bool:
    return {worker["state"] for worker in world.registry()["workers"]} == {"ready"}


def kill(process: Process | None, number: int = signal.SIGKILL) -> None:
    assert process is not None
    os.kill(process.pid, number)


def test_every_way_to_die_is_noticed_and_mended(world: World) -> None:
    began = time.monotonic()
    world.execute("start")
    see("one worker ready", seconds=round(time.monotonic() - began, 1))
    seen = [Path(f"/proc/{one.pid}/cmdline").read_text() for one in world.processes()]
    for victim, number in (("server", 9), ("engine", 9), ("engine", signal.SIGSTOP)):
        process = world.server(0) if victim == "server" else world.engine(0)
        engine = world.engine(0)
        url = world.registry()["workers"][0]["url"]
        began = time.monotonic()
        kill(process, number)
        wait_for("clients hear of it", lambda: not ready(world), within_s=5)
        heard_s = time.monotonic() - began
        health = status_of(f"{url}/health")
        wait_for("it is mended", lambda: ready(world), within_s=600)
        assert not engine.is_alive()
        evidence = world.rows(
            "select evidence from pool_worker_change where state in ('dead', 'suspect') order by change_id"
        )
        see(
            f"{victim} got signal {int(number)}",
            heard_s=round(heard_s, 2),
            health_said=health,
            mended_s=round(time.monotonic() - began, 1),
            evidence=[row["evidence"].splitlines()[0] for row in evidence][-2:],
        )
        assert heard_s < 2
    key = world.key()
    see("thirty requests at once to four sequences", statuses=_overload(world, key))
    began = time.monotonic()
    world.execute("stop")
    stopped_s = time.monotonic() - began
    see("stopped, every check passed", seconds=round(stopped_s, 2))
    assert stopped_s < 10
    nothing_is_left(world)
    seen += [path.read_text() for path in world.settings.logs.rglob("*.log*")]
    for table in ("pool", "pool_worker", "pool_worker_change", "claim", "progress"):
        seen += [str(row) for row in world.rows(f"select * from {table}")]
    assert not any(key in text for text in seen)
    for row in world.rows("select attempt, startup from pool_worker order by attempt"):
        see(f"start {row['attempt']}", **row["startup"])


def _overload(world: World, key: str) -> dict[int, int]:
    """Statuses of more requests than the worker may queue, and how many of each."""
    (worker,) = world.registry()["workers"]

    async def all_at_once() -> list[int]:
        async with probes.session(key) as client:

            async def one() -> int:
                body = probes.chat("tiny-qwen3", 64)
                async with client.post(f"{worker['url']}/v1/chat/completions", json=body) as response:
                    await response.read()
                    return response.status

            return await asyncio.gather(*(one() for _ in range(30)))

    statuses = Counter(asyncio.run(all_at_once()))
    assert set(statuses) == {200, 503}
    return dict(statuses)


def test_a_worker_is_stopped_at_any_moment_of_its_start(world: World) -> None:
    for after_s in (1, 5, 20):
        starting = _start_in_a_process(world)
        wait_for("the server exists", lambda: world.workers(), within_s=60)
        time.sleep(after_s)
        processes_then = len(world.processes())
        began = time.monotonic()
        world.execute("stop")
        see(
            f"stopped {after_s} s into the start",
            processes=processes_then,
            seconds=round(time.monotonic() - began, 2),
        )
        starting.wait(timeout=60)
        nothing_is_left(world)


def test_a_start_that_is_killed_at_any_moment_leaves_nothing_after_reap(world: World) -> None:
    for after_s in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 9.0, 13.0):
        starting = _start_in_a_process(world)
        time.sleep(after_s)
        starting.kill()
        starting.wait()
        there = len(world.processes())
        report = reap(world.settings, "run-1", force=True)
        see(f"start killed after {after_s} s", processes=there, reaped=report.message)
        nothing_is_left(world)
        assert world.rows("select 1 from pool where ended_at is null") == []
        world.provision("run-1", (0,))
    world.execute("start")
    assert ready(world)
    see("and the pool came back")
    world.execute("stop")
    nothing_is_left(world)


def _start_in_a_process(world: World) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.cli.main", "start", "--run", world.run_id],
        stderr=subprocess.DEVNULL,
        cwd=deployment.REPOSITORY,
    )


def test_what_a_user_is_told_when_a_start_cannot_succeed(world: World, tmp_path: Path) -> None:
    whole = tiny_qwen3()
    without_weights = tmp_path / "broken"
    shutil.copytree(whole, without_weights)
    weights = (whole / "model.safetensors").read_bytes()
    (without_weights / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    unknown = tmp_path / "unknown"
    shutil.copytree(whole, unknown)
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "architectures": ["FrobnicatorForCausalLM"]}))
    missing = tmp_path / "missing"
    shutil.copytree(whole, missing)
    (missing / "model.safetensors").unlink()
    cases: dict[str, tuple[Path, dict[str, Any], str]] = {
        "wrong flag": (whole, {"extra_args": {"frobnicate": 1}}, "bad flag"),
        "a shard is missing": (missing, {}, "files missing"),
        "a shard is cut off": (without_weights, {}, "files missing"),
        "an architecture that vLLM does not know": (unknown, {}, "unsupported architecture"),
        "too little memory for the longest row": (
            whole,
            {"max_model_len": 1024, "kv_cache_memory_mb": 16, "extra_args": {"block-size": 16}},
            "out of memory",
        ),
        "more memory than there is": (whole, {"kv_cache_memory_mb": 4_000_000}, "out of memory"),
    }
    # Flags are checked before anything is started; what vLLM itself says is the second line of defence.
    world.configure(serving_flags=str(tmp_path / "none.json"), worker_attempts=1)
    for number, (what, (release, serving, kind)) in enumerate(cases.items()):
        world.close_runs()
        run_id = world.run_id = f"case-{number}"
        world.add_run(run_id, cores=(0,), serving={**SERVING, **serving})
        world.succeed(run_id, "convert", {"release_id": "tiny-qwen3", "path": str(release)})
        with pytest.raises(StageError) as told:
            world.execute("start")
        see(what, error=type(told.value).__name__, says=str(told.value))
        log = next(iter((world.settings.logs / run_id).glob("worker-0.log")))
        shutil.copy(log, KEPT / f"{what.replace(' ', '-')}.log")
        assert world.processes() == []
        assert _kind_of(str(told.value)) == kind, str(told.value)


def _kind_of(text: str) -> str:
    from tasks.serving import diagnosis

    return next((known.kind for known in diagnosis.KNOWN if known.says in text), "unknown")


def test_an_occupied_port_is_passed_over_by_the_real_vllm(world: World) -> None:
    import socket

    first = world.settings.port_range[0]
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", first + 3))
        other.listen()
        world.execute("start")
        (worker,) = world.registry()["workers"]
        see("an occupied port", held=first + 3, url=worker["url"])
        assert int(worker["url"].rsplit(":", 1)[1]) >= first + world.settings.ports_per_worker
    world.execute("stop")


@pytest.mark.skipif(os.environ.get("REAL_WORKERS") != "long", reason="waits ten minutes")
def test_workers_live_ten_minutes_without_the_database_and_end_with_their_lease(world: World) -> None:
    with Forwarder(world.url) as forwarder:
        (world.home / "ledger").write_text(forwarder.url)
        world.configure(lease_s=660.0, lease_renew_s=5.0)
        world.execute("start")
        registry, key = world.pool().registry, world.key()
        url = world.registry()["workers"][0]["url"]
        forwarder.fail("refuses")
        gone = time.monotonic()
        while time.monotonic() - gone < 600:
            assert status_of(f"{url}/v1/models", key) == 200
            time.sleep(10)
        assert status_of(f"{registry}/v1/pool", key) == 200
        see("the database is gone", seconds=round(time.monotonic() - gone), worker="serves")
        wait_for("all ended", lambda: not world.processes(), within_s=90)
        see("all ended by the keeper's clock", seconds=round(time.monotonic() - gone), lease_s=660)
