"""Finding what nobody parents any more. The processes are sleeping shells."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from tasks import settings as deployment
from tasks.node import processes
from tasks.node.processes import Process
from tasks.serving import leftovers
from tests.serving.pool_world import wait_for


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In a deployment of its own, whose processes are ended afterwards."""
    monkeypatch.setenv("QWEN_PIPELINE_DEPLOYMENT", f"test-{uuid4().hex[:8]}")
    deployment.current.cache_clear()
    yield tmp_path / "log"
    processes.end_all(processes.find, grace_s=0)
    deployment.current.cache_clear()


def server(part: str, log: Path) -> tuple["subprocess.Popen[bytes]", Process, Process]:
    """A server that forks a child without any mark; (child object, leader, forked)."""
    pid_file = log.with_name(uuid4().hex)
    script = f"env -i sleep 600 & echo $! > {pid_file}; wait"
    child = processes.spawn(["sh", "-c", script], processes.environment(part), log, outlives_parent=True)
    leader = processes.identify(child.pid)
    forked_pid = int(wait_for("the fork", lambda: pid_file.exists() and pid_file.read_text().strip()))
    # Until `env` has become sleep, it is the shell's fork and has its marks.
    wait_for("exec", lambda: Path(f"/proc/{forked_pid}/cmdline").read_bytes().startswith(b"sleep\0"))
    forked = processes.identify(forked_pid)
    assert leader is not None
    assert forked is not None
    return child, leader, forked


def test_a_forked_process_without_marks_is_found_by_its_session(log: Path) -> None:
    child, leader, forked = server("run-1/worker-0", log)
    assert forked not in leftovers.workers("run-1"), "it carries no mark"
    assert set(leftovers.workers("run-1", [leader])) == {leader, forked}
    os.kill(leader.pid, signal.SIGKILL)
    child.wait()
    assert processes.session_of(leader) == [forked]
    assert leftovers.end("run-1", [leader], None, keeper_grace_s=0) == []
    assert not forked.is_alive()


def test_a_number_that_belongs_to_another_process_now_is_left_alone(log: Path) -> None:
    child, leader, forked = server("run-1/worker-0", log)
    an_older_one = replace(leader, start_ticks=leader.start_ticks - 1)
    of_another_boot = replace(leader, boot_id="another")
    assert processes.session_of(an_older_one) == []
    assert processes.session_of(of_another_boot) == []
    assert leftovers.end("run-2", [an_older_one, of_another_boot], an_older_one, keeper_grace_s=0) == []
    assert leader.is_alive()
    assert forked.is_alive()
    os.killpg(leader.pid, signal.SIGKILL)
    child.wait()


def test_only_keepers_and_workers_are_the_pools(log: Path) -> None:
    children = {
        part: processes.spawn(["sleep", "600"], processes.environment(part), log, outlives_parent=True)
        for part in ("run-1/keeper", "run-1/worker-12", "run-1/convert", "run-11/worker-0", "run-1/worker-x")
    }
    pids = {part: child.pid for part, child in children.items()}
    assert [process.pid for process in leftovers.keepers("run-1")] == [pids["run-1/keeper"]]
    assert leftovers.runs() == {"run-1", "run-11"}
    assert leftovers.end("run-1", [], None, keeper_grace_s=0) == []
    living = {part for part, child in children.items() if child.poll() is None}
    assert {"run-1/convert", "run-11/worker-0"} <= living
    assert not {"run-1/keeper", "run-1/worker-12"} & living
    processes.end_all(processes.find, grace_s=0)
    for child in children.values():
        child.wait()
