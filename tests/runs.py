"""Runs to test with, and the processes that act for them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import SecretStr

from tasks import ledger as ledger_package
from tasks.ledger import Ledger, Run
from tasks.settings import REPOSITORY, Settings
from tasks.spec import RunSpec, parse

SQL = REPOSITORY / "sql"

LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""A process whose leader is a zombie while a thread lives, as one that hangs in the kernel after SIGKILL."""


def port_range() -> tuple[int, int]:
    """Ports of this test process alone: others run beside it, and a world asks whether its ports are free again."""
    first = 22000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return first, first + 999


def a_spec(**changes: Any) -> RunSpec:
    """A small run on CPU; `changes` replace whole fields."""
    return parse(
        {
            "model": {"repo": "owner/name"},
            "layout": {"cpu": 1},
            "batch": {"input": "/prompts", "output": "/answers", "id": "id", "prompt": "prompt"},
            **changes,
        }
    )


def a_run(
    ledger: Ledger, run_id: str = "run-1", pins: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> Run:
    """A run in the ledger, without asking the hub."""
    spec = a_spec(**changes)
    return ledger_package.register(ledger, run_id, spec, {"asked": spec.model_dump(mode="json"), **pins})


def open_ledger(url: str) -> Ledger:
    """The ledger in the database at `url`; a context manager that closes it."""
    return Ledger(url, SQL)


def settings_of(home: Path, url: str, **changes: Any) -> Settings:
    """The settings of a deployment that keeps everything below `home`."""
    return Settings(home=home, ledger_url=SecretStr(url), **changes)


def environment_of(settings: Settings) -> dict[str, str]:
    """What a process that acts for this deployment needs in its environment."""
    assert settings.ledger_url is not None
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "QWEN_PIPELINE_HOME": str(settings.home),
        "QWEN_PIPELINE_DEPLOYMENT": settings.deployment,
        "QWEN_PIPELINE_LEDGER_URL": settings.ledger_url.get_secret_value(),
        "QWEN_PIPELINE_CLAIM_WATCH_S": str(settings.claim_watch_s),
        "QWEN_PIPELINE_LOCK_WAIT_S": str(settings.lock_wait_s),
    }


@contextmanager
def python(code: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A Python process that executes `code`; killed at the end of the block if it still lives."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=env if env is not None else {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(happened: Callable[[], Any], deadline_s: float = 60.0) -> Any:
    """What `happened` returns once that is true.

    Raises:
        AssertionError: it is not within the deadline.
    """
    deadline = time.monotonic() + deadline_s
    while not (value := happened()):
        assert time.monotonic() < deadline, "what the test waits for did not happen in time"
        time.sleep(0.01)
    return value


def outputs(processes: Sequence[subprocess.Popen[str]], timeout_s: float = 60.0) -> list[str]:
    """What each of the processes printed, when all have ended well."""
    printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, text
    return printed
