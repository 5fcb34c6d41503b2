"""Starts of the real vLLM on CPU that are stopped, killed, or cannot succeed; see test_real_workers.py."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import StageError
from tasks.reap import reap
from tasks.serving import diagnosis
from tests.serving.pool_world import World, wait_for
from tests.serving.real_model import KEPT, tiny_qwen3
from tests.serving.real_world import (
    ASKED_FOR,
    MODEL,
    SERVING,
    is_ready,
    nothing_is_left,
    real_world,
    see,
    start_in_a_process,
)

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(3600), ASKED_FOR]

MOMENTS_S = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 13.0, 20.0, 30.0)


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A run with one CPU slot."""
    with real_world(tmp_path, database_url, monkeypatch, cores=(0,)) as made:
        yield made


def test_a_worker_is_stopped_at_any_moment_of_its_start(world: World) -> None:
    for after_s in (1, 5, 20):
        starting = start_in_a_process(world)
        wait_for("the server exists", lambda: world.workers(), within_s=120)
        time.sleep(after_s)
        processes = len(world.processes())
        began = time.monotonic()
        world.execute("stop")
        see(
            f"stopped {after_s} s into the start",
            processes_before=processes,
            seconds=round(time.monotonic() - began, 2),
            start_ended_with=starting.wait(timeout=60),
        )
        nothing_is_left(world)


def test_a_start_that_is_killed_at_any_moment_leaves_nothing_after_reap(world: World) -> None:
    for after_s in MOMENTS_S:
        starting = start_in_a_process(world)
        time.sleep(after_s)
        starting.kill()
        starting.wait()
        pool = world.rows("select registry from pool where ended_at is null")
        processes = len(world.processes())
        began = time.monotonic()
        report = reap(world.settings, "run-1", force=True)
        see(
            f"start killed after {after_s} s",
            pool="none" if not pool else "served" if pool[0]["registry"] else "intended",
            processes_before=processes,
            reaped=report.message,
            seconds=round(time.monotonic() - began, 2),
        )
        nothing_is_left(world)
        assert world.rows("select 1 from pool where ended_at is null") == []
        world.provision("run-1", (0,))
    began = time.monotonic()
    world.execute("start")
    assert is_ready(world)
    see("and the pool came back", seconds=round(time.monotonic() - began, 1))
    world.execute("stop")
    nothing_is_left(world)


def test_what_a_user_is_told_when_a_start_cannot_succeed(world: World, tmp_path: Path) -> None:
    whole = tiny_qwen3()
    cases: dict[str, tuple[Path, dict[str, Any], str]] = {
        "a flag that vLLM refuses": (whole, {"extra_args": {"frobnicate": 1}}, "bad flag"),
        "a value that vLLM refuses": (whole, {"extra_args": {"block-size": "many"}}, "bad flag"),
        "a shard is missing": (_without_a_shard(whole, tmp_path / "missing"), {}, "files missing"),
        "a shard is cut off": (_with_half_a_shard(whole, tmp_path / "half"), {}, "files missing"),
        "an architecture that vLLM does not know": (
            _of_an_unknown_architecture(whole, tmp_path / "unknown"),
            {},
            "unsupported architecture",
        ),
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
        world.succeed(run_id, "convert", {"release_id": MODEL, "path": str(release)})
        began = time.monotonic()
        with pytest.raises(StageError) as told:
            world.execute("start")
        see(
            what,
            error=type(told.value).__name__,
            exit_status=told.value.exit_status,
            seconds=round(time.monotonic() - began, 1),
            says=str(told.value),
            lease=world.lease().state,
        )
        shutil.copy(world.settings.logs / run_id / "worker-0.log", KEPT / f"{what.replace(' ', '-')}.log")
        nothing_is_left(world)
        assert _kind_of(str(told.value)) == kind, str(told.value)


def _without_a_shard(release: Path, folder: Path) -> Path:
    shutil.copytree(release, folder)
    (folder / "model.safetensors").unlink()
    return folder


def _with_half_a_shard(release: Path, folder: Path) -> Path:
    shutil.copytree(release, folder)
    weights = (release / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return folder


def _of_an_unknown_architecture(release: Path, folder: Path) -> Path:
    shutil.copytree(release, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["FrobnicatorForCausalLM"]}))
    return folder


def _kind_of(text: str) -> str:
    return next((known.kind for known in diagnosis.KNOWN if known.says in text), "unknown")


def test_a_port_is_passed_over_when_it_is_held_and_another_block_taken_when_it_is_lost_later(
    world: World,
) -> None:
    first, size = world.settings.port_range[0], world.settings.ports_per_worker
    with _listening(first + 3):
        lost = threading.Thread(target=_take_the_port_of_the_first_start, args=(world,))
        lost.start()
        began = time.monotonic()
        world.execute("start")
        lost.join()
    (worker,) = world.registry()["workers"]
    starts = world.rows("select attempt, lower(ports) as port, evidence from pool_worker order by attempt")
    see(
        "a port that is held, and one that is taken between choice and bind",
        held=first + 3,
        starts=starts,
        url=worker["url"],
        seconds=round(time.monotonic() - began, 1),
    )
    blocks = [row["port"] for row in starts]
    assert blocks[0] >= first + size
    assert len(set(blocks)) == 2
    world.execute("stop")
    nothing_is_left(world)


def _take_the_port_of_the_first_start(world: World) -> None:
    """Before vLLM binds it, which is some seconds after it was chosen; held until the worker has died of it."""
    chosen = "select lower(ports) as port from pool_worker where attempt = 1"
    (row,) = wait_for("a port is chosen", lambda: world.rows(chosen), within_s=120)
    with _listening(row["port"]):
        died = "select 1 from pool_worker where attempt = 1 and state = 'dead'"
        wait_for("the worker died of it", lambda: world.rows(died), within_s=900)


def _listening(port: int) -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    held.listen()
    return held


def test_a_worker_serves_although_the_disk_of_its_log_is_full(world: World) -> None:
    log = world.settings.logs / "run-1" / "worker-0.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    world.execute("start")
    see("a worker whose log has no room is ready", workers=world.registry()["workers"])
    assert is_ready(world)
    world.execute("stop")
    nothing_is_left(world)
