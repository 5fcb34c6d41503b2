"""Logs stay bounded while a server writes to them, and what is newest can be read."""

import errno
from pathlib import Path

import pytest

from tasks.serving import log_files


def test_a_log_that_grew_is_put_aside_under_the_hands_of_its_writer(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    with log.open("ab", buffering=0) as server:
        for number in range(5):
            server.write(f"{number}\n".encode() * 600)
            log_files.bound(log, max_bytes=1000, keep=2)
            assert log.stat().st_size == 0
        server.write(b"the newest\n")
    assert log.read_text() == "the newest\n", "no hole where the writer was before"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "worker-0.log",
        "worker-0.log.1",
        "worker-0.log.2",
    ]
    assert log_files.tail(log, 2) == ["4", "the newest"]


def test_a_small_log_stays_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log_files.bound(log, max_bytes=1000, keep=2)
    log.write_text("a line\n")
    log_files.bound(log, max_bytes=1000, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0.log"]


def test_each_attempt_begins_a_log_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    for attempt in range(4):
        log_files.begin_anew(log, keep=2)
        log.write_text(f"attempt {attempt}\n")
    assert log_files.tail(log, 1) == ["attempt 3"]
    assert log_files.tail(log, 10) == ["attempt 2", "attempt 3"]
    assert len(list(tmp_path.iterdir())) == 3
    assert log_files.tail(tmp_path / "none.log", 5) == []


def test_on_a_disk_that_is_full_a_log_is_emptied_without_being_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text("a line\n" * 1000)

    def full(source: Path, target: Path) -> None:
        Path(target).write_text("a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    log_files.bound(log, max_bytes=1000, keep=2)
    assert log.stat().st_size == 0
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0.log"]


def test_no_more_than_the_end_of_a_log_is_read_however_it_grows(tmp_path: Path) -> None:
    endless = tmp_path / "worker-0.log"
    endless.symlink_to("/dev/zero")
    (text,) = log_files.tail(endless, 1)
    assert len(text) == 200_000
