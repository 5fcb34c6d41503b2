"""Children that can be found again, know no secret, and end when they should; and nobody else does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tasks import settings
from tasks.node import processes
from tasks.node.processes import DEPLOYMENT, PART, Process, identify, this_process
from tests.runs import LEADERLESS, python, wait_until

SLEEP = ["sleep", "1000"]

SPAWN_AND_WAIT = """
import os, sys, time
from pathlib import Path
from tasks.node import processes
outlives = {"tied": False, "outlives": True}[sys.argv[1]]
environment = processes.environment("r/s")
child = processes.spawn(["sleep", "1000"], environment, Path("/dev/null"), outlives_parent=outlives)
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def deployment(monkeypatch, tmp_path):
    """A deployment of this test's own, none of whose processes outlives the test."""
    name = f"test-{uuid4().hex[:8]}"
    monkeypatch.setenv("QWEN_PIPELINE_DEPLOYMENT", name)
    monkeypatch.setenv("QWEN_PIPELINE_HOME", str(tmp_path))
    settings.current.cache_clear()
    yield name
    processes.end_all(lambda: processes.find(deployment=name), grace_s=0)
    settings.current.cache_clear()


@pytest.fixture
def spawn(tmp_path):
    """Start a tied child of this process."""
    children = []

    def start(command=SLEEP, part="run-1/download", log=tmp_path / "log.txt"):
        children.append(processes.spawn(command, processes.environment(part), log))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


def started(child, command=b"sleep"):
    """The child's identity, once setpriv has become what it was to start."""
    wait_until(lambda: Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(command))
    return identify(child.pid)


def test_the_environment_of_a_child_is_made_from_a_list(monkeypatch, spawn, tmp_path, deployment):
    secrets = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://a:hunter2@h/d",
        "AIRFLOW__API_AUTH__JWT_SECRET": "hunter2",
        "QWEN_PIPELINE_LEDGER_URL": "postgresql://l:hunter2@h/d",
        "HF_TOKEN": "hunter2",
        "PYTHONPATH": "/hunter2",
        "LD_PRELOAD": "",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("QWEN_PIPELINE_NODE", "dgx-7")
    log = tmp_path / "environment.txt"
    assert spawn(["env", "-0"], "run-1/convert", log).wait() == 0
    seen = dict(line.split("=", 1) for line in log.read_text().rstrip("\0").split("\0"))
    assert "hunter2" not in log.read_text()
    assert seen[DEPLOYMENT] == deployment
    assert seen[PART] == "run-1/convert"
    assert seen["QWEN_PIPELINE_NODE"] == "dgx-7"
    listed = {
        "PATH",
        "HOME",
        "USER",
        "LANG",
        "LC_ALL",
        "TZ",
        "TMPDIR",
        "JAVA_HOME",
        "PYDANTIC_DISABLE_PLUGINS",
    }
    assert {name for name in seen if not name.startswith(("QWEN_PIPELINE_", "OPENBLAS_"))} <= listed


def test_what_a_child_needs_besides_is_added_and_wins():
    made = processes.environment("r/s", {"VLLM_API_KEY": "k", "PATH": "/only"})
    assert (made["VLLM_API_KEY"], made["PATH"]) == ("k", "/only")


def test_a_tied_child_ends_when_its_parent_is_killed():
    with python(SPAWN_AND_WAIT, "tied", env=dict(os.environ)) as parent:
        child = identify(int(parent.stdout.readline()))
        wait_until(lambda: Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(b"sleep"))
        assert child.is_alive()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_until(lambda: not child.is_alive())


def test_a_child_that_is_to_outlive_its_parent_does():
    with python(SPAWN_AND_WAIT, "outlives", env=dict(os.environ)) as parent:
        child = identify(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert child.is_alive()
    assert processes.find("r") == [child]
    assert processes.end([child], grace_s=0) == []
    assert not child.is_alive()


def test_a_child_has_a_session_of_its_own(spawn):
    child = started(spawn())
    assert os.getsid(child.pid) == child.pid != os.getsid(0)


def test_processes_are_found_by_part_and_by_what_is_below_it(spawn, deployment):
    parts = ["run-1/worker-1", "run-1/worker-10", "run-1", "run-10/worker-1"]
    found = {part: started(spawn(part=part)) for part in parts}
    assert processes.find("run-1/worker-1") == [found["run-1/worker-1"]]
    assert set(processes.find("run-1")) == {found[part] for part in parts[:3]}
    assert set(processes.find()) == set(found.values())
    assert processes.find(deployment=deployment + "0") == []


def test_a_grandchild_carries_the_marks(spawn):
    spawn(["sh", "-c", "sleep 1000 & wait"], "run-1/convert")
    wait_until(lambda: len(processes.find("run-1/convert")) == 2)


def test_end_asks_first_and_kills_after_the_grace(spawn, tmp_path):
    polite = spawn(
        ["sh", "-c", f"trap 'touch {tmp_path}/asked; exit 0' TERM; echo up; while :; do sleep 0.05; done"]
    )
    deaf = spawn(["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"])
    wait_until(lambda: (tmp_path / "log.txt").read_text().count("up") == 2)
    both = [identify(polite.pid), identify(deaf.pid)]
    assert processes.end(both, grace_s=0.5) == []
    assert (tmp_path / "asked").exists()
    assert (polite.wait(), deaf.wait()) == (0, -signal.SIGKILL)


def test_end_without_grace_kills_at_once_even_what_is_stopped(spawn):
    child = spawn()
    process = started(child)
    child.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert processes.end([process], grace_s=0) == []
    assert time.monotonic() - began < 5
    assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("grace_s", [0.0, 0.1])
@pytest.mark.parametrize(
    "other",
    [
        lambda real: Process(real.pid, real.start_ticks + 1, real.boot_id, real.host),
        lambda real: Process(real.pid, real.start_ticks, "another-boot", real.host),
        lambda real: Process(real.pid, real.start_ticks, real.boot_id, "another-host"),
    ],
    ids=["start time", "boot", "host"],
)
def test_end_never_signals_a_process_that_only_has_the_pid(spawn, other, grace_s):
    real = started(spawn())
    assert processes.end([other(real)], grace_s) == []
    assert real.is_alive()


def test_end_looks_again_once_the_pid_cannot_change_its_meaning_any_more(spawn, monkeypatch):
    """The process ends, and its pid is given away, between the first look and the pidfd."""
    stranger = started(spawn())
    gone = Process(stranger.pid, stranger.start_ticks - 1, stranger.boot_id, stranger.host)
    looks = iter([True, False, False])
    monkeypatch.setattr(Process, "is_alive", lambda self: next(looks))
    assert processes.end([gone], grace_s=0) == []
    monkeypatch.undo()
    assert stranger.is_alive()


def test_end_is_content_with_a_process_that_ends_by_itself_just_then(spawn, monkeypatch):
    child = spawn()
    process = started(child)
    send = signal.pidfd_send_signal

    def too_late(fd, number):
        child.kill()
        child.wait()
        send(fd, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", too_late)
    assert processes.end([process], grace_s=0) == []


def test_end_does_not_end_the_caller():
    assert processes.end([this_process()], grace_s=0) == []


def test_end_all_ends_what_is_forked_while_it_ends(spawn):
    # Children that do not die with their parent.
    forks = "while :; do setsid sleep 1000 & sleep 0.02; done"
    spawn(["sh", "-c", forks], "run-1/convert")
    wait_until(lambda: len(processes.find("run-1/convert")) > 3)
    assert processes.end_all(lambda: processes.find("run-1/convert"), grace_s=0) == []
    assert processes.find("run-1/convert") == []


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = identify(child.pid)
    wait_until(lambda: b") Z " in Path(f"/proc/{child.pid}/stat").read_bytes())
    assert not process.is_alive()
    assert identify(child.pid) is None
    child.wait()


def test_a_leader_that_is_a_zombie_is_alive_while_a_thread_of_it_is(spawn):
    child = spawn([sys.executable, "-c", LEADERLESS])
    wait_until(lambda: b") Z " in Path(f"/proc/{child.pid}/stat").read_bytes())
    process = identify(child.pid)
    assert process is not None
    assert process.is_alive()
    assert processes.session_of(process) == [process]
    assert processes.find() == [], "its environment cannot be read"
    assert processes.end([process], grace_s=0) == []
    assert not process.is_alive()
    assert child.wait() == -signal.SIGKILL


def test_a_stopped_process_gets_no_grace_because_it_hears_nothing(spawn):
    stopped, polite = spawn(), spawn()
    both = [started(stopped), started(polite)]
    stopped.send_signal(signal.SIGSTOP)
    wait_until(both[0].is_stopped)
    began = time.monotonic()
    assert processes.end(both, grace_s=60) == []
    assert time.monotonic() - began < 10
    assert (stopped.wait(), polite.wait()) == (-signal.SIGKILL, -signal.SIGTERM)
