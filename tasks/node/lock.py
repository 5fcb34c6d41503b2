"""Node locks: they guard what cannot check an epoch (NVML, signals, files).

A lock is an flock on a file, held by the acting process itself. Python opens files close-on-exec, so no child
keeps a lock that its dead parent held, and the kernel drops it at the holder's death, whatever killed it.
The file's text says who holds it, for messages; a lock on a full or read-only disk is held without it, because those
who give devices back must act there, too.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from tasks.errors import Busy
from tasks.node.processes import Process, this_process

_POLL_S = 0.05
_NO_WRITING = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@contextmanager
def held(path: Path, purpose: str, wait_s: float) -> Iterator[None]:
    """Hold the lock at `path` for the length of the block.

    Args:
        purpose: what the holder does, for the message of those who wait in vain.
        wait_s: how long to wait for a holder to go away.

    Raises:
        Busy: somebody else still holds it; the message names them.
    """
    descriptor = _opened(path)
    try:
        _acquire(descriptor, path, wait_s)
        _say_who(descriptor, purpose)
        yield
    finally:
        os.close(descriptor)


def holder(path: Path) -> Process | None:
    """Who holds the lock at `path`, as far as that is known.

    Worth something only right after `held` said busy: who has let go of the lock may still have it open.
    """
    try:
        said = json.loads(path.read_bytes())
        process = Process(said["pid"], said["start_ticks"], said["boot_id"], said["host"])
        # Where its successors could not write, somebody is named who has ended or gone on to other things.
        return process if process.is_alive() and _has_open(process, path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno not in _NO_WRITING or not path.exists():
            raise
    return os.open(path, os.O_RDONLY)


def _say_who(descriptor: int, purpose: str) -> None:
    text = json.dumps({"purpose": purpose, **asdict(this_process())})
    try:
        # Over what is there, with spaces after it: a file that is emptied first may find no room any more.
        os.pwrite(descriptor, text.ljust(os.fstat(descriptor).st_size).encode(), 0)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)


def _has_open(process: Process, path: Path) -> bool:
    wanted = path.stat()
    for entry in os.scandir(f"/proc/{process.pid}/fd"):
        with suppress(OSError):
            if os.path.samestat(os.stat(entry.path), wanted):
                return True
    return False


def _acquire(descriptor: int, path: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Busy(
                    f"the node lock {path.name} is held by {_holder(descriptor)} and was not free within "
                    f"{wait_s:.0f} s; try again when that has ended"
                ) from None
            time.sleep(_POLL_S)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"{holder['purpose']} (pid {holder['pid']})"
    except (ValueError, KeyError):
        return "a process that has not said who it is"
