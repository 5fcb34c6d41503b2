"""The test's side of `tests.kill.stage_server`: run an action in a process of its own and see how it ends."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[2]
_PASSED_ON = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "JAVA_HOME", "OPENBLAS_CORETYPE")


@dataclass(frozen=True)
class Action:
    """What is run and killed: a function of a module, with arguments that survive JSON."""

    name: str
    call: str
    """`module:function`."""
    args: tuple[Any, ...] = ()
    stages: Mapping[str, str] = field(default_factory=dict)
    """Stages that only this test knows: name to module."""
    modules: tuple[str, ...] = ()
    """Imported once, before the processes fork."""


def stage(name: str, run_id: str, module: str | None = None) -> Action:
    """`stages.execute(name, run_id)`; with `module`, of a stage that only the test knows."""
    known = {name: module} if module else {}
    return Action(name, "tasks.stages:execute", (name, run_id), known, tuple(known.values()))


@dataclass(frozen=True)
class Point:
    """One point that a process passed."""

    n: int
    name: str
    kind: str
    detail: str


@dataclass(frozen=True)
class Ended:
    """How a run of an action ended."""

    points: tuple[Point, ...]
    killed_at: Point | None
    """Where it was killed as ordered; None when it ended by itself."""
    result: Any
    error: str | None
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether the action ended by itself and well."""
        return self.killed_at is None and self.error is None


class Launcher:
    """Starts the server when it is first needed; use as a context manager, or call `close`."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def run(
        self,
        action: Action,
        environment: Mapping[str, str],
        folder: Path,
        *,
        kill_at: int | None = None,
        in_child: str | None = None,
        also: Sequence[str] = (),
        timeout_s: float = 120.0,
    ) -> Ended:
        """Run `action` to its end or its death; its trace and its log are in `folder` afterwards."""
        folder.mkdir(parents=True, exist_ok=True)
        trace, log = folder / "trace.jsonl", folder / "log.txt"
        for old in (trace, log):
            old.unlink(missing_ok=True)
        began = time.monotonic()
        self._ask(
            {
                "call": action.call,
                "args": action.args,
                "stages": dict(action.stages),
                "modules": action.modules,
                "environment": {**passed_on(), **environment},
                "log": str(log),
                "orders": {"trace": str(trace), "kill_at": kill_at, "in_child": in_child, "also": list(also)},
            }
        )
        pid = self._answer(timeout_s)["pid"]
        status = self._answer(timeout_s, pid)["status"]
        return _read(trace, log, status, time.monotonic() - began)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.close()
            self._server.wait(timeout=20)
            self._server.stdout.close()
            self._server = None

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> None:
        if self._server is None:
            # The server dies with its input; so nothing is left when the tests themselves are killed.
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.kill.stage_server"],
                cwd=_REPOSITORY,
                env=passed_on(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()

    def _answer(self, timeout_s: float, pid: int | None = None) -> dict[str, Any]:
        assert self._server is not None
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], timeout_s)[0] and pid is not None:
            # SIGABRT: faulthandler writes into the log where every thread is.
            for number in (signal.SIGABRT, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                time.sleep(0.5)
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError("the stage server ended; its output says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def passed_on() -> dict[str, str]:
    """Of this process's environment, what a process under test gets."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def _read(trace: Path, log: Path, status: int, seconds: float) -> Ended:
    passed: list[Point] = []
    killed_at: Point | None = None
    result: Any = None
    error: str | None = None
    lines = trace.read_text().splitlines() if trace.exists() else []
    for line in lines:
        entry = json.loads(line)
        if "n" in entry:
            point = Point(entry["n"], entry["name"], entry["kind"], entry["detail"])
            passed.append(point)
            killed_at = point if entry["killed"] else killed_at
        result = entry.get("result", result)
        error = entry.get("error", error)
    if killed_at is None and error is None and status != 0:
        error = f"ended with status {status} without a word; the end of its log:\n{log.read_text()[-2000:]}"
    return Ended(tuple(passed), killed_at, result, error, seconds)
