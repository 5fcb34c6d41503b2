"""The local hub (demo/hub.py) as a process of its own."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from demo.children import Children, last_lines
from tasks.errors import StageFailed
from tasks.settings import REPOSITORY

_STARTS_WITHIN_S = 60.0


def start_hub(
    children: Children, url: str, root: Path, ready: Path, environment: Mapping[str, str], log: Path
) -> None:
    """Serve the repositories below `root` at `url`; returns once it answers. One that lives is kept.

    Args:
        ready: a file that it writes when it listens.

    Raises:
        StageFailed: it does not start; with the end of its log.
    """
    if children.find("hub") is None:
        ready.unlink(missing_ok=True)
    port = url.rpartition(":")[2]
    process = children.start(
        "hub",
        [sys.executable, "-m", "demo.hub", "--port", port, "--root", root, "--ready-file", ready],
        environment=environment,
        log=log,
        cwd=REPOSITORY,
    )
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while not ready.exists():
        if not process.is_alive() or time.monotonic() > deadline:
            raise StageFailed(f"the local hub did not start; the end of {log}:\n{last_lines(log)}")
        time.sleep(0.05)
