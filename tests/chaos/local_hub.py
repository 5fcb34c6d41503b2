"""A server on this host that speaks the hub's protocol (demo/hub.py), with one repository."""

import os
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from demo.children import Children, kept_port
from demo.hub_process import start_hub


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
        environment, log = {"PATH": os.environ["PATH"]}, self.home / "hub.log"
        start_hub(self._children, self.url, root, self.home / "hub-ready", environment, log)
