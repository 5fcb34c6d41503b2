"""The path of `make demo`, for real: Airflow, PostgreSQL, Spark, vLLM on CPU, llm-compressor, the hub's client.

One story, because each chapter stands on the one before and costs minutes: interrupted while its workers load the
model, run to the end, tampered with, run again. (That no row is asked again after an interruption is for tests/chaos.)
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from demo.check import count
from demo.world import World
from tasks.node import processes

REPOSITORY = Path(__file__).resolve().parents[2]
HOME = REPOSITORY / "var" / "test-demo"
ROWS = 40
"""Of the demo's prompts."""

pytestmark = [pytest.mark.whole_pipeline, pytest.mark.timeout(2900)]


class Demo:
    """`python -m demo up` in a process of its own, with its output in a file."""

    def __init__(self, name: str) -> None:
        self.log = HOME / f"{name}.log"
        HOME.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "demo", "up", "--home", str(HOME), "--rows", str(ROWS)],
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "200"},
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_it_says(self, pattern: str, deadline_s: float) -> None:
        self.wait_for(
            f"it says {pattern!r}", lambda: bool(re.search(pattern, self.said, re.MULTILINE)), deadline_s
        )

    def wait_for(self, what: str, happened: Callable[[], bool], deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not happened():
            assert self.process.poll() is None, f"the demo ended before {what}:\n{self.said}"
            assert time.monotonic() < deadline, f"not in {deadline_s} s: {what}\n{self.said}"
            time.sleep(0.2)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait(self, deadline_s: float) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.interrupt()
            self.process.wait(120)
            pytest.fail(f"the demo did not end within {deadline_s} s:\n{self.said}")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_afterwards():
    yield
    subprocess.run([sys.executable, "-m", "demo", "down", "--home", str(HOME)], cwd=REPOSITORY, check=False)


def world() -> World:
    return World(HOME)


def summary() -> dict:
    return json.loads((HOME / "summary.json").read_text())


def stages_of(run_id: str) -> dict[str, dict]:
    """What the command line's status says of each stage; the database is started for that alone."""
    demo = world()
    demo.cluster.start()
    try:
        said = subprocess.run(
            [Path(sys.executable).parent / "qwen-pipeline", "status", "--run", run_id, "--json"],
            env={**os.environ, **demo.environment()},
            check=True,
            capture_output=True,
            text=True,
        )
    finally:
        demo.cluster.stop()
    return {row["stage"]: row for row in json.loads(said.stdout)["stages"]}


def a_worker_runs() -> bool:
    """Of vLLM, on the run's first slot."""
    found = processes.find(deployment=world().deployment)
    return any((processes.part_of(one) or "").endswith("/worker-0") for one in found)


def assert_nothing_runs() -> None:
    demo = world()
    assert processes.find(deployment=demo.deployment) == []
    ports = [HOME / "hub-port", HOME / "postgres" / "port", HOME / "airflow" / "port"]
    for port in (int(path.read_text()) for path in ports if path.exists()):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def test_interrupted_finished_and_mended():
    interrupted = Demo("interrupted")
    interrupted.wait_until_it_says(r"^start +running", deadline_s=900)
    interrupted.wait_for("a worker runs", a_worker_runs, deadline_s=120)
    interrupted.interrupt()
    assert interrupted.wait(120) == 130
    assert_nothing_runs()

    finished = Demo("finished")
    assert finished.wait(900) == 0, finished.said
    assert_nothing_runs()
    first = summary()
    counted = count(world().prompts / "prompts.parquet", world().answers)
    assert counted.holds
    assert (counted.rows_in, counted.answered, counted.failed) == (
        first["rows_in"],
        first["answered"],
        first["failed"],
    )
    assert counted.rows_in == ROWS

    # Of the answers alone: a conversion takes minutes, and tests/weights mends releases.
    lost_answers = next(world().answers.glob("v-*/part-*.parquet"))
    answers = lost_answers.read_bytes()
    lost_answers.unlink()

    mended = Demo("mended")
    assert mended.wait(900) == 0, mended.said
    assert_nothing_runs()
    assert lost_answers.read_bytes() == answers
    second = summary()
    assert {name: second[name] for name in ("answered", "failed", "completion_tokens")} == {
        name: first[name] for name in ("answered", "failed", "completion_tokens")
    }
    outcomes = {name: row["outcome"] for name, row in stages_of(second["run_id"]).items()}
    idle = {name for name, outcome in outcomes.items() if outcome == "nothing to do"}
    assert idle >= {
        "download",
        "convert",
        "prepare",
        "provision",
        "start",
        "run",
        "reconcile",
        "stop",
        "restore",
    }
    assert {name for name, outcome in outcomes.items() if outcome == "done"} == {"publish"}
