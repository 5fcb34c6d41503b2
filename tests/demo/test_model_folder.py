"""A model folder is there whole or not at all, and is built once."""

import json
import os
import signal
import subprocess
import sys

import pytest

from demo.models.folder import MANIFEST, build_once, is_whole

INPUTS = {"recipe": "1"}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "owner" / "model"


def fill(staging):
    (staging / "config.json").write_text("{}")
    (staging / "weights").mkdir()
    (staging / "weights" / "part").write_bytes(b"\0" * 1000)


def never(staging):
    raise AssertionError("it was whole")


def test_a_second_build_of_the_same_inputs_changes_nothing(folder):
    assert build_once(folder, INPUTS, fill)
    before = folder.stat().st_ino, (folder / "config.json").stat().st_mtime_ns
    assert not build_once(folder, INPUTS, never)
    assert before == (folder.stat().st_ino, (folder / "config.json").stat().st_mtime_ns)


def spoil(folder):
    (folder / "weights" / "part").write_bytes(b"\0" * 999 + b"\1")


def delete(folder):
    (folder / "config.json").unlink()


def add(folder):
    (folder / "stray").write_text("")


def cut_manifest(folder):
    manifest = folder / MANIFEST
    manifest.write_text(manifest.read_text()[:20])


@pytest.mark.parametrize("damage", [spoil, delete, add, cut_manifest])
def test_what_is_not_whole_is_built_again(folder, damage):
    build_once(folder, INPUTS, fill)
    damage(folder)
    assert build_once(folder, INPUTS, fill)
    assert is_whole(folder, INPUTS)
    assert not (folder / "stray").exists()


def test_other_inputs_are_built_anew(folder):
    build_once(folder, INPUTS, fill)
    assert build_once(folder, {"recipe": "2"}, fill)
    assert json.loads((folder / MANIFEST).read_text())["inputs"] == {"recipe": "2"}


def test_a_build_that_fails_leaves_what_was_there(folder):
    build_once(folder, INPUTS, fill)
    with pytest.raises(ZeroDivisionError):
        build_once(folder, {"recipe": "2"}, lambda staging: 1 // 0)
    assert is_whole(folder, INPUTS)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["model"]


def test_a_build_that_is_killed_leaves_nothing_to_be_served_and_the_next_one_cleans_up(folder):
    code = f"""
import os, pathlib, signal
from demo.models.folder import build_once
def build(staging):
    (staging / "config.json").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
build_once(pathlib.Path({str(folder)!r}), {INPUTS!r}, build)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")] == []
    assert build_once(folder, INPUTS, fill)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["model"]


def test_everybody_may_read_a_model(folder):
    def private(staging):
        (staging / "weights").touch(mode=0o600)

    build_once(folder, INPUTS, private)
    assert os.stat(folder).st_mode & 0o777 == 0o755
    assert os.stat(folder / "weights").st_mode & 0o777 == 0o644
