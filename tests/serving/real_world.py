"""A deployment with the real vLLM on CPU, and what is looked at when a worker of it has ended."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tasks import settings as deployment
from tasks.serving import ports, scratch
from tests.serving.pool_world import World, make_world
from tests.serving.real_model import KEPT, tiny_qwen3

SERVING = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256, "kv_cache_memory_mb": 32}
MODEL = "tiny-qwen3"

ASKED_FOR = pytest.mark.skipif(
    "REAL_WORKERS" not in os.environ, reason="REAL_WORKERS=1 asks for these minutes"
)


@contextmanager
def real_world(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, cores: tuple[int, ...], **settings: Any
) -> Iterator[World]:
    """A run of a tiny Qwen3 with a CPU slot for each of `cores`."""
    # Ports that no other test takes in between, because it is looked whether they are free afterwards.
    patience = {"start_timeout_s": 900, "worker_silence_s": 30, "port_range": [20000, 20999]}
    # What vLLM learns about a model class costs it 10 s of a core, so it is kept.
    cache = {"worker_environment": {"VLLM_CACHE_ROOT": str(KEPT / "vllm-cache")}}
    made = make_world(tmp_path, url, monkeypatch, **{"worker_command": [], **patience, **cache, **settings})
    made.add_run("run-1", cores=cores, serving=SERVING)
    made.succeed("run-1", "convert", {"release_id": MODEL, "path": str(tiny_qwen3())})
    try:
        yield made
    finally:
        made.close()


def see(what: str, **seen: Any) -> None:
    """Print what was seen, with when it was and how busy the machine was."""
    when = {"at": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}", "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({"seen": what, **seen, **when}), flush=True)


def is_ready(world: World) -> bool:
    """Whether every worker is."""
    return {worker["state"] for worker in world.registry()["workers"]} == {"ready"}


def start_in_a_process(world: World) -> "subprocess.Popen[bytes]":
    """`qwen-pipeline start`, as a person types it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.cli.main", "start", "--run", world.run_id],
        stdout=subprocess.DEVNULL,
        stderr=(world.home / "start.log").open("ab"),
        cwd=deployment.REPOSITORY,
    )


def nothing_is_left(world: World) -> None:
    """No process, by mark and by session; no listener; no temporary file; no shared memory."""
    assert world.processes() == []
    started = world.rows("select pid, lower(ports) as port, shared_memory from pool_worker")
    assert [pid for row in started if (pid := row["pid"]) and _session_lives(pid, world)] == []
    assert ports.occupied([row["port"] for row in started]) == []
    assert not scratch.of_run(world.run_id).exists()
    assert not [path for row in started for path in row["shared_memory"] if os.path.exists(path)]


def _session_lives(session: int, world: World) -> bool:
    """Whether a process of that session has this deployment's home in its command line or environment."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            known = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if int(fields[3]) == session and fields[0] != "Z" and str(world.home).encode() in known:
                return True
    return False


def where_is(secrets: dict[str, str], world: World, *texts: object) -> list[str]:
    """Where a secret can be read although it must not: `ps`, files of the deployment, the ledger, `texts`.

    Args:
        secrets: what each is called, and what it is.
    """
    found = []

    def look(place: object, read: Callable[[], str]) -> None:
        with suppress(OSError):
            text = read()
            found.extend(f"{name} in {place}" for name, secret in secrets.items() if secret in text)

    for command in Path("/proc").glob("[0-9]*/cmdline"):
        look(command, lambda: command.read_bytes().decode(errors="replace"))  # noqa: B023
    kept_for_that = {world.home / "secret", world.home / "ledger"}
    for folder in (world.home, KEPT / "vllm-cache"):
        for path in folder.rglob("*"):
            if path.is_file() and path not in kept_for_that:
                look(path, lambda: path.read_bytes().decode(errors="replace"))  # noqa: B023
    tables = world.rows("select table_name from information_schema.tables where table_schema = 'ledger'")
    assert len(tables) > 5
    for table in (row["table_name"] for row in tables):
        look(f"table {table}", lambda: str(world.rows(f'select * from ledger."{table}"')))  # noqa: B023
    for text in texts:
        look("what the stages told", lambda: str(text))  # noqa: B023
    return found
