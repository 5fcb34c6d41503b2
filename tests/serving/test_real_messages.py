"""What a user is told when a start of the real vLLM on CPU cannot succeed; see test_real_workers.py.

docs/workers.md has these messages in a table.
"""

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import StageError
from tasks.serving import diagnosis
from tests.serving.pool_world import World, wait_for
from tests.serving.real_model import KEPT, tiny_qwen3
from tests.serving.real_world import ASKED_FOR, MODEL, SERVING, nothing_is_left, real_world, see

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(3600), ASKED_FOR]


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A run with one CPU slot."""
    with real_world(tmp_path, database_url, monkeypatch, cores=(0,)) as made:
        yield made


def _whole(folder: Path) -> None:
    pass


def _without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _with_half_a_shard(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def _of_an_unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["FrobnicatorForCausalLM"]}))


def _for_long_rows(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 65_536}))


@pytest.mark.parametrize(
    ("breaks", "serving", "kind"),
    [
        pytest.param(_whole, {"extra_args": {"frobnicate": 1}}, "bad flag", id="wrong flag"),
        pytest.param(_whole, {"extra_args": {"block-size": "many"}}, "bad flag", id="wrong value"),
        pytest.param(_without_a_shard, {}, "files missing", id="missing shard"),
        pytest.param(_with_half_a_shard, {}, "files missing", id="half a shard"),
        pytest.param(_of_an_unknown_architecture, {}, "unsupported architecture", id="unknown architecture"),
        pytest.param(
            _whole, {"extra_args": {"block-size": 16}}, "bad flag", id="value for another kind of slot"
        ),
        pytest.param(
            _for_long_rows,
            {"max_model_len": 32_768, "kv_cache_memory_mb": 16},
            "out of memory",
            id="too little memory",
        ),
        pytest.param(_whole, {"kv_cache_memory_mb": 4_000_000}, "out of memory", id="more than there is"),
    ],
)
def test_a_start_that_cannot_succeed_says_why_and_who_can_help(
    world: World,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    breaks: Callable[[Path], None],
    serving: dict[str, Any],
    kind: str,
) -> None:
    release = tmp_path / "release"
    shutil.copytree(tiny_qwen3(), release)
    breaks(release)
    # Flags are checked before anything is started; what vLLM itself says is the second line of defence.
    world.configure(serving_flags=str(tmp_path / "none.json"), worker_attempts=1)
    world.close_runs()
    world.run_id = "case"
    world.add_run("case", cores=(0,), serving={**SERVING, **serving})
    world.succeed("case", "convert", {"release_id": MODEL, "path": str(release)})
    began = time.monotonic()
    with pytest.raises(StageError) as told:
        world.execute("start")
    see(
        request.node.callspec.id,
        error=type(told.value).__name__,
        exit_status=told.value.exit_status,
        seconds=round(time.monotonic() - began, 1),
        says=str(told.value),
        lease=world.lease().state,
    )
    name = request.node.callspec.id.replace(" ", "-")
    shutil.copy(world.settings.logs / "case" / "worker-0.log", KEPT / f"{name}.log")
    nothing_is_left(world)
    assert _kind_of(str(told.value)) == kind, str(told.value)


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
