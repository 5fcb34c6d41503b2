"""`make setup`, twice, killed, and beside itself. The real environments are only looked at; what needs a
set-up to work is done in a copy whose uv is a script."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NOTHING = "setup: nothing to do"
UV = """#!{python}
import os, pathlib, sys, time
root, arguments = pathlib.Path({root!r}), sys.argv[1:]
with open(root / "calls", "a") as calls:
    calls.write(" ".join(arguments) + "\\n")
if arguments[0] == "venv":
    folder = pathlib.Path(arguments[-1])
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "bin" / "python").unlink(missing_ok=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "lib/python3.11/site-packages/vllm-1.2.3.dist-info").mkdir(parents=True, exist_ok=True)
    vllm = folder / "bin" / "vllm"
    help = "  --host HOST   Says --nothing.\\n  --port, -p\\n  --max-model-len N"
    vllm.write_text(f"#!/bin/sh\\necho '{{help}}'\\n")
    vllm.chmod(0o755)
if arguments[:2] == ["pip", "sync"]:
    (root / "syncing").touch()
    while (root / "gate").exists():
        time.sleep(0.02)
    if (root / "broken").exists():
        sys.exit("no such package")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A copy of what set-up reads, with a uv that makes empty environments and waits while `gate` exists."""
    copytree(REPOSITORY / "environments", tmp_path / "environments")
    (tmp_path / "pyproject.toml").write_bytes((REPOSITORY / "pyproject.toml").read_bytes())
    binaries = tmp_path / ".envs" / "uv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "uv").write_text(UV.format(python=sys.executable, root=str(tmp_path)))
    (binaries / "uv").chmod(0o755)
    (binaries / "python").symlink_to(REPOSITORY / ".envs" / "uv" / "bin" / "python")
    pinned = (tmp_path / "environments" / "uv.txt").read_text(encoding="utf-8")
    (binaries.parent / "setup-stamp").write_text(f"{binaries.parent}\n{pinned}", encoding="utf-8")
    yield tmp_path
    (tmp_path / "gate").unlink(missing_ok=True)
    with (tmp_path / ".envs" / "setup.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the last process of a set-up here has ended


def start(root: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, root / "environments" / "setup.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(setup: "subprocess.Popen[str]") -> str:
    output, _ = setup.communicate(timeout=300)
    assert setup.returncode == 0, output
    return output


def calls(root: Path) -> list[str]:
    """What uv was asked for since the last time."""
    path = root / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def files(root: Path) -> Iterator[tuple[str, int, int, int]]:
    """Every file by path, inode, size and time of change, but for the bytecode that any import may write."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            status = os.lstat(os.path.join(folder, name))
            yield os.path.join(folder, name), status.st_ino, status.st_size, status.st_mtime_ns


def test_a_second_setup_takes_under_5_s_and_changes_no_file():
    folders = [
        REPOSITORY / ".venv",
        *(REPOSITORY / ".envs" / n for n in ("spark", "serving", "convert", "uv")),
    ]
    # If not, the set-up below would work on environments that others may be using.
    subprocess.run([sys.executable, REPOSITORY / "environments/setup.py", "check"], check=True, timeout=300)
    before = {folder: set(files(folder)) for folder in folders}
    seconds = []
    while not seconds or (
        min(seconds) >= 5 and len(seconds) < 3
    ):  # a machine can be busy with something else
        begin = time.monotonic()
        ended = subprocess.run(["make", "setup"], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
        seconds.append(time.monotonic() - begin)
        assert ended.returncode == 0, ended.stderr
        assert NOTHING in ended.stdout
    for folder in folders:
        assert set(files(folder)) == before[folder]
    assert min(seconds) < 5


def test_setup_leaves_the_command():
    ended = subprocess.run([REPOSITORY / ".venv/bin/qwen-pipeline", "--help"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_all_environments_are_made_and_then_left_alone(checkout):
    output = finish(start(checkout))
    assert all(f"{name} ready" in output for name in ("airflow", "spark", "serving", "convert"))
    kept = (checkout / ".envs/serving/vllm-flags.json").read_text(encoding="utf-8")
    assert "--host" in kept
    assert "--nothing" not in kept
    calls(checkout)
    assert NOTHING in finish(start(checkout))
    assert calls(checkout) == []


def test_flags_of_a_vllm_that_was_not_made_here_are_written_beside_it(checkout, tmp_path):
    finish(start(checkout))
    own = tmp_path / "own"
    copytree(checkout / ".envs/serving", own, symlinks=True)
    (own / "vllm-flags.json").unlink()
    command = [sys.executable, checkout / "environments/setup.py", "flags", "--python", own / "bin/python"]
    subprocess.run(command, check=True, timeout=60)
    assert json.loads((own / "vllm-flags.json").read_text())["version"] == "1.2.3"

    (own / "bin/vllm").unlink()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert f"there is no vLLM in {own}" in ended.stderr


def test_a_changed_lock_touches_its_own_environment_only_and_in_place(checkout):
    finish(start(checkout))
    calls(checkout)
    with (checkout / "environments" / "spark.txt").open("a") as lock:
        lock.write("# changed\n")
    finish(start(checkout))
    asked = calls(checkout)
    assert [line.split()[:2] for line in asked] == [["pip", "sync"]]
    assert "spark" in asked[0]


def test_a_setting_of_a_tool_touches_no_environment(checkout):
    finish(start(checkout))
    with (checkout / "pyproject.toml").open("a") as project:
        project.write("\n[tool.some-linter]\nstrict = true\n")
    assert NOTHING in finish(start(checkout))


def test_what_a_killed_setup_left_is_made_anew_but_only_after_its_tools_have_ended(checkout):
    (checkout / "gate").touch()
    killed = start(checkout)
    wait_for(checkout / "syncing")
    os.kill(killed.pid, signal.SIGKILL)  # its uv lives on
    killed.wait()
    successor = start(checkout)
    assert successor.stdout is not None
    assert "another one is at work" in successor.stdout.readline()
    before = calls(checkout)
    (checkout / "gate").unlink()
    finish(successor)
    killed.communicate()
    assert sum(line.startswith("venv") for line in before) >= 1
    assert sum(line.startswith("venv --clear") for line in calls(checkout)) == 4
    assert NOTHING in finish(start(checkout))


def test_two_setups_at_once_do_the_work_once(checkout):
    (checkout / "gate").touch()
    first = start(checkout)
    wait_for(checkout / "syncing")
    second = start(checkout)
    assert second.stdout is not None
    assert "another one is at work" in second.stdout.readline()
    (checkout / "gate").unlink()
    finish(first)
    assert NOTHING in finish(second)
    assert sum("sync" in line for line in calls(checkout)) == 4


def test_a_failed_step_is_named_with_what_to_do_and_the_next_setup_repairs_it(checkout):
    (checkout / "broken").touch()
    failed = start(checkout)
    output, _ = failed.communicate(timeout=300)
    assert failed.returncode == 1
    for expected in ("spark: 'uv pip sync", "no such package", "run 'make setup' again"):
        assert expected in output
    assert "Traceback" not in output
    (checkout / "broken").unlink()
    finish(start(checkout))
    assert NOTHING in finish(start(checkout))
