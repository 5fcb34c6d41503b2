import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from demo.children import Children, kept_port, write_private
from tasks.node import processes

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    made = Children(tmp_path / "children", f"test-children-{token_hex(4)}")
    yield made
    made.end_all(grace_s=0)


def wait(happened: Callable[[], object], deadline_s: float = 20) -> None:
    deadline = time.monotonic() + deadline_s
    while not happened():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def start(children: Children, name: str, command: list[str] = SLEEP) -> processes.Process:
    return children.start(name, command, environment={}, log=children.folder / f"{name}.log")


def test_a_child_that_lives_is_kept(children: Children) -> None:
    assert start(children, "one") == start(children, "one")


def test_a_child_that_died_is_started_again(children: Children) -> None:
    first = start(children, "one")
    os.kill(first.pid, signal.SIGKILL)
    wait(lambda: children.find("one") is None)
    assert start(children, "one") != first


def test_another_shell_ends_the_children_of_a_killed_starter(children: Children) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from demo.children import Children\n"
        "folder = Path(sys.argv[1]); children = Children(folder, sys.argv[2])\n"
        "children.start('one', [sys.executable, '-c', 'import time; time.sleep(600)'],"
        " environment={}, log=folder / 'one.log')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    starter = subprocess.run(
        [sys.executable, "-c", code, children.folder, children.deployment], cwd=REPOSITORY, check=False
    )
    assert starter.returncode == -signal.SIGKILL
    child = children.find("one")
    assert child is not None
    assert child.is_alive()
    children.end("one")
    assert not child.is_alive()


def test_a_child_killed_before_its_record_was_written_is_found(children: Children) -> None:
    child = start(children, "one")
    (children.folder / "one.json").unlink()
    assert children.find("one") == child
    children.end_all()
    assert not child.is_alive()


def test_a_reused_process_id_is_not_taken_for_the_child(children: Children) -> None:
    child = start(children, "one")
    stranger = subprocess.Popen(SLEEP, env={})
    try:
        record = children.folder / "one.json"
        # Long ago, whatever the clock's ticks say: two starts within one tick would look the same.
        recorded = json.loads(record.read_text())
        recorded["process"] |= {"pid": stranger.pid, "start_ticks": 1}
        record.write_text(json.dumps(recorded))
        assert children.find("one") is None
        children.end("one", grace_s=0)
        assert not child.is_alive()  # found by its marks
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_ending_a_child_ends_what_it_started(children: Children) -> None:
    script = f"import subprocess; subprocess.Popen({SLEEP}, start_new_session=True).wait()"
    start(children, "one", [sys.executable, "-c", script])
    wait(lambda: len(children.living("one")) == 2)
    tree = children.living("one")
    children.end("one")
    assert not any(process.is_alive() for process in tree)


def test_a_child_sees_only_what_it_was_given(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "hidden")
    child = start(children, "one")
    environment = Path(f"/proc/{child.pid}/environ").read_bytes()
    assert b"SOME_SECRET" not in environment
    assert f"QWEN_PIPELINE_DEPLOYMENT={children.deployment}".encode() in environment


def test_a_port_stays_the_same_until_another_is_asked_for(tmp_path: Path) -> None:
    port = kept_port(tmp_path / "port")
    assert kept_port(tmp_path / "port") == port
    assert kept_port(tmp_path / "port", another=True) != port


def test_a_private_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    write_private(tmp_path / "file", "first")
    write_private(tmp_path / "file", "second")
    assert (tmp_path / "file").read_text() == "second"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
