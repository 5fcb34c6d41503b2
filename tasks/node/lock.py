"""Node locks: they guard what cannot check an epoch (NVML, signals, files).

A lock is an flock on a file, held by the acting process itself. Python opens files close-on-exec, so no child
keeps a lock that its dead parent held, and the kernel drops it at the holder's death, whatever killed it.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tasks.errors import Busy
from tasks.node.processes import Process, this_process

_POLL_S = 0.05


@contextmanager
def held(path: Path, purpose: str, wait_s: float) -> Iterator[None]:
    """Hold the lock at `path` for the length of the block.

    Args:
        purpose: what the holder does, for the message of those who wait in vain.
        wait_s: how long to wait for a holder to go away.

    Raises:
        Busy: somebody else still holds it; the message names them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _acquire(descriptor, path, wait_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor,
            json.dumps({"purpose": purpose, **asdict(this_process())}).encode(),
            0,
        )
        yield
    finally:
        os.close(descriptor)


def holder(path: Path) -> Process | None:
    """Who holds the lock at `path`, or held it last; None when nobody has said so.

    Worth something only right after `held` said busy: who has let go of the lock stays named.
    """
    try:
        said = json.loads(path.read_bytes())
        return Process(said["pid"], said["start_ticks"], said["boot_id"], said["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
