"""Temporary files of workers: vLLM's sockets and rendezvous files stay behind when it is killed.

So each worker has a folder of its own for them, whose name follows from the run: whoever ends a run's workers
knows what to remove. Short, because a socket's path may have 107 bytes (unix(7)) and vLLM adds 37; where the
deployment's home is too deep for that, it is in the system's folder for such files.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

from tasks import settings

_LONGEST = 107 - 37 - len("/worker-999")


def of_run(run_id: str) -> Path:
    """The folder of all the run's workers on this host."""
    here = settings.current()
    name = hashlib.sha256(f"{here.deployment}/{run_id}".encode()).hexdigest()[:12]
    below_home = here.home / "tmp" / name
    return below_home if len(str(below_home)) <= _LONGEST else Path(tempfile.gettempdir()) / f"qwen-{name}"


def make(run_id: str, worker_id: str) -> Path:
    """A worker's folder, empty, for its owner only."""
    folder = of_run(run_id) / worker_id
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    return folder


def remove(folder: Path) -> None:
    """Remove a folder of one worker, or of a run; nothing happens when it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
