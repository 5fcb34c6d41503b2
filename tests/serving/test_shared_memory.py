"""Files in /dev/shm: only what was ours goes, and only when nobody has it open."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from tasks.node import processes
from tasks.serving import shared_memory

_HOLD = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(file, 4096)
mapped = mmap.mmap(file, 4096)
os.close(file)
print("mapped", flush=True)
sys.stdin.read()
"""

_SEMAPHORE = """
import os, sys
from _multiprocessing import SemLock
held = SemLock(1, 1, 1, "/" + os.path.basename(sys.argv[1]).removeprefix("sem."), False)
print("mapped", flush=True)
sys.stdin.read()
"""


@contextmanager
def a_file_held_by_a_process(
    script: str = _HOLD, name: str = "psm_test"
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """As Python's SharedMemory holds it: mapped, and its descriptor closed."""
    path = f"/dev/shm/{name}_{uuid4().hex}"
    command = [sys.executable, "-c", script, path]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mapped\n"
        yield path, holder
    finally:
        holder.kill()
        holder.communicate()
        Path(path).unlink(missing_ok=True)


@pytest.mark.parametrize(("script", "name"), [(_HOLD, "psm_test"), (_SEMAPHORE, "sem.test")])
def test_what_a_process_has_mapped_is_found_and_kept_until_it_ends(script: str, name: str) -> None:
    """A named semaphore too, which the kernel shows under a name that is gone."""
    with a_file_held_by_a_process(script, name) as (path, holder):
        process = processes.identify(holder.pid)
        assert process is not None
        assert path in shared_memory.held_by([process])
        assert shared_memory.remove([path]) == [path]
        assert os.path.exists(path)
        holder.kill()
        holder.wait()
        assert os.path.exists(path), "a killed process leaves it"
        assert shared_memory.remove([path]) == []
        assert not os.path.exists(path)


def test_what_is_not_shared_memory_is_never_touched(tmp_path: Path) -> None:
    other = tmp_path / "file"
    other.touch()
    assert shared_memory.remove([str(other), "/dev/shm/no-such-file"]) == []
    assert other.exists()
