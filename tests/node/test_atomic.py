"""A file is old or new for every reader, and a killed writer's draft does not stay."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.node import atomic
from tasks.node.processes import host


def test_the_text_is_there_and_nothing_else(tmp_path):
    path = tmp_path / "deep" / "note.json"
    atomic.replace_text(path, "one")
    atomic.replace_text(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(path.parent) == ["note.json"]


def test_a_writer_that_dies_leaves_the_old_text_and_the_next_one_removes_its_draft(tmp_path):
    path = tmp_path / "note[1].json"
    atomic.replace_text(path, "old")
    program = (
        "import os, sys; from pathlib import Path; from tasks.node import atomic\n"
        "os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
        "atomic.replace_text(Path(sys.argv[1]), 'new')"
    )
    killed = subprocess.run([sys.executable, "-c", program, path], check=False)
    assert killed.returncode == -9
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2
    atomic.replace_text(path, "newer")
    assert path.read_text() == "newer"
    assert os.listdir(tmp_path) == ["note[1].json"]


def test_a_living_writers_draft_and_other_files_are_left_alone(tmp_path):
    living = tmp_path / f".note.{host()}.{os.getppid()}"
    others = [living, tmp_path / ".note.elsewhere.1", tmp_path / f".another.{host()}.999999999"]
    for other in others:
        other.write_text("")
    atomic.replace_text(tmp_path / "note", "text")
    assert all(other.exists() for other in others)


def test_many_writers_at_once_leave_one_of_their_texts(tmp_path):
    texts = [str(number) * 10_000 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda text: atomic.replace_text(tmp_path / "note", text), texts * 8))
    assert (tmp_path / "note").read_text() in texts
    assert os.listdir(tmp_path) == ["note"]


def test_a_folder_that_cannot_be_written_is_said_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        atomic.replace_text(tmp_path / "file" / "note", "text")
