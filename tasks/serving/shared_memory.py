"""Files in /dev/shm that a worker's processes leave when they are killed: nobody else would remove them.

Their names say nothing of whose they are, so they are noted while their processes live (`held_by`), and a file
that any living process still has open is never removed. A file is known by its inode, not by the name under
which it was mapped: sem_open(3) makes a named semaphore under another name, maps it, links it to its own name
and unlinks the other. (On an H200 each engine that was killed left one of joblib's, sem.loky-PID-....)
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tasks.node.processes import Process

FOLDER = "/dev/shm/"


def held_by(processes: Iterable[Process]) -> set[str]:
    """Files in /dev/shm that the processes have mapped or open now."""
    there = _by_inode()
    return {there[inode] for process in processes for inode in _of(process.pid) & there.keys()}


def remove(paths: Iterable[str]) -> list[str]:
    """Remove those of `paths` that nobody has open; returns those that somebody has."""
    wanted = {path for path in paths if path.startswith(FOLDER) and os.path.exists(path)}
    if not wanted:
        return []
    open_inodes = {inode for pid in _pids() for inode in _of(pid)}
    in_use = {path for inode, path in _by_inode().items() if inode in open_inodes} & wanted
    for path in wanted - in_use:
        with suppress(OSError):
            os.unlink(path)
    return sorted(in_use)


def _by_inode() -> dict[int, str]:
    with suppress(OSError):
        return {entry.inode(): FOLDER + entry.name for entry in os.scandir(FOLDER)}
    return {}


def _of(pid: int) -> set[int]:
    """Inodes in /dev/shm of what the process has mapped, whatever it is called by now, and of what it has open."""
    found: set[int] = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            words = line.split(maxsplit=5)  # address, rights, offset, device, inode, path
            if len(words) == 6 and words[5].startswith(FOLDER):
                found.add(int(words[4]))
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(entry.path).startswith(FOLDER):
                    found.add(os.stat(entry.path).st_ino)
    return found


def _pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
