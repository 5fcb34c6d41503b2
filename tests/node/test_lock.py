"""A node lock is held by one process, named to those who wait, and free when its holder is gone."""

import errno
import os
import signal
import threading
from uuid import uuid4

import pytest

from tasks.errors import Busy
from tasks.node import lock, processes
from tasks.node.lock import held
from tests.runs import python, wait_until

HOLD = """
import sys, time
from pathlib import Path
from tasks.node import lock, processes
with lock.held(Path(sys.argv[1]), "hold it for a test", wait_s=0):
    if sys.argv[2:]:
        environment = processes.environment("r/s")
        processes.spawn(["sleep", "1000"], environment, Path("/dev/null"), outlives_parent=True)
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "locks" / "run-1-weights.lock"


def holder(path, *arguments, env=None):
    return python(HOLD, str(path), *arguments, env=env)


def test_a_lock_that_is_held_is_busy_and_its_holder_is_named(path):
    with holder(path) as other:
        other.stdout.readline()
        with pytest.raises(Busy, match=rf"hold it for a test \(pid {other.pid}\)"), held(path, "me too", 0):
            pass


def test_a_lock_is_free_after_its_block(path):
    with held(path, "first", 0):
        pass
    with held(path, "second", 0):
        pass


def test_a_lock_is_free_after_a_block_that_raised(path):
    with pytest.raises(ZeroDivisionError), held(path, "first", 0):
        raise ZeroDivisionError
    with held(path, "second", 0):
        pass


def test_a_lock_is_free_when_its_holder_was_killed(path):
    with holder(path) as other:
        other.stdout.readline()
        other.send_signal(signal.SIGKILL)
        other.wait()
    with held(path, "me too", 0):
        pass


def test_a_child_does_not_keep_the_lock_of_its_dead_parent(path, tmp_path):
    name = f"test-{uuid4().hex[:8]}"
    environment = {**os.environ, "QWEN_PIPELINE_DEPLOYMENT": name, "QWEN_PIPELINE_HOME": str(tmp_path)}
    try:
        with holder(path, "and have a child", env=environment) as other:
            other.stdout.readline()
            other.send_signal(signal.SIGKILL)
            other.wait()
        assert len(processes.find(deployment=name)) == 1
        with held(path, "me too", 0):
            pass
    finally:
        processes.end_all(lambda: processes.find(deployment=name), grace_s=0)


def test_who_waits_gets_the_lock_when_it_is_free(path):
    got = threading.Event()

    def wait_for_it():
        with held(path, "me too", wait_s=30):
            got.set()

    waiting = threading.Thread(target=wait_for_it)
    with holder(path) as other:
        other.stdout.readline()
        waiting.start()
        wait_until(waiting.is_alive)
        assert not got.is_set()
        other.send_signal(signal.SIGKILL)
        assert got.wait(10)
    waiting.join()


def test_the_new_holder_is_named_and_not_the_one_before(path):
    with held(path, "a purpose that is very much longer than the next one", 0):
        pass
    with holder(path) as other:
        other.stdout.readline()
        with pytest.raises(Busy) as refused, held(path, "me too", 0):
            pass
    assert "longer" not in str(refused.value)
    assert "hold it for a test" in str(refused.value)


def refuse(number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    return refused


def test_a_lock_on_a_full_disk_is_held_without_a_name(path, monkeypatch):
    with held(path, "before", 0):
        pass
    monkeypatch.setattr(os, "pwrite", refuse(errno.ENOSPC))
    with held(path, "now", 0):
        monkeypatch.undo()
        with (
            pytest.raises(Busy, match="held by a process that has not said who it is"),
            held(path, "me too", 0),
        ):
            pass
        assert lock.holder(path) is None


def test_a_lock_is_named_anew_without_giving_up_its_room_on_the_disk(path, monkeypatch):
    with held(path, "a purpose that is very much longer than the next one", 0):
        pass
    size = path.stat().st_size
    monkeypatch.setattr(os, "ftruncate", refuse(errno.ENOSPC))
    with held(path, "short", 0):
        assert lock.holder(path) == processes.this_process()
    assert path.stat().st_size == size


def test_a_lock_on_a_read_only_disk_is_held_and_names_nobody_who_let_go_of_it(path, monkeypatch):
    with held(path, "before", 0):
        pass
    really_open = os.open

    def read_only(file, flags, *mode):
        return refuse(errno.EROFS)() if flags & os.O_RDWR else really_open(file, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with held(path, "now", 0), pytest.raises(Busy), held(path, "me too", 0):
        pass
    assert lock.holder(path) is None, "this process is named, and has let go of it"
    path.unlink()
    with pytest.raises(OSError, match="Read-only"), held(path, "none to hold", 0):
        pass
