"""Files in /dev/shm that a worker's processes leave when they are killed: nobody else would remove them.

Their names say nothing of whose they are, so they are noted while their processes live (`held_by`), and a file
that any living process still has open is never removed.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tasks.node.processes import Process

FOLDER = "/dev/shm/"


def held_by(processes: Iterable[Process]) -> set[str]:
    """Files in /dev/shm that the processes have mapped or open now."""
    return {path for process in processes for path in _of(process.pid)}


def remove(paths: Iterable[str]) -> list[str]:
    """Remove those of `paths` that nobody has open; returns those that somebody has."""
    there = {path for path in paths if path.startswith(FOLDER) and os.path.exists(path)}
    if not there:
        return []
    in_use = {path for pid in _pids() for path in _of(pid)} & there
    for path in there - in_use:
        with suppress(OSError):
            os.unlink(path)
    return sorted(in_use)


def _of(pid: int) -> set[str]:
    found: set[str] = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            _, slash, rest = line.partition(FOLDER)
            if slash:
                found.add(FOLDER + rest)
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(os.readlink(entry.path))
    return {path for path in found if path.startswith(FOLDER) and not path.endswith(" (deleted)")}


def _pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
