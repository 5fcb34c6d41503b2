"""A server on this host that speaks the hub's protocol (demo/hub.py), with one repository."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from demo.children import Children, kept_port
from tasks.settings import REPOSITORY


class LocalHub:
    """Keeps its files, its port and its log in `home`, and its process among `children`."""

    def __init__(self, home: Path, children: Children) -> None:
        self.home = home
        self._children = children

    @cached_property
    def url(self) -> str:
        """The same for as long as it runs."""
        port = self.home / "hub-port"
        running = self._children.find("hub") is not None
        return f"http://127.0.0.1:{port.read_text() if running else kept_port(port)}"

    def start(self, repo: str, write_model: Callable[[Path], None]) -> None:
        """Answer for `repo`, which `write_model` writes into a folder; what runs is kept."""
        root = self.home / "hub"
        if not (root / repo).exists():
            draft = self.home / "hub-draft"
            shutil.rmtree(draft, ignore_errors=True)
            write_model(draft)
            (root / repo).parent.mkdir(parents=True, exist_ok=True)
            draft.rename(root / repo)
        ready = self.home / "hub-ready"
        if self._children.find("hub") is None:
            ready.unlink(missing_ok=True)
            self._children.start(
                "hub",
                [
                    *(sys.executable, "-m", "demo.hub", "--port", self.url.rpartition(":")[2]),
                    *("--root", root, "--ready-file", ready),
                ],
                environment={"PATH": os.environ["PATH"]},
                log=self.home / "hub.log",
                cwd=REPOSITORY,
            )
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline, (self.home / "hub.log").read_text()
            time.sleep(0.05)
