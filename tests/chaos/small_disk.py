"""A file system small enough to be filled: a tmpfs, when the program is root; else a folder, which never is full."""

import os
import subprocess
from pathlib import Path

_BYTES = 256 * 2**20


class SmallDisk:
    """Mounted at `path` between `mount` and `unmount`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self) -> None:
        """What is mounted is kept."""
        self.path.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0 and not self.path.is_mount():
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_BYTES}", "tmpfs", self.path], check=True)

    def unmount(self) -> None:
        """All that was on it is gone."""
        if self.path.is_mount():
            subprocess.run(["umount", self.path], check=True)

    def fill(self) -> None:
        """Leave no byte."""
        with self._filler.open("wb", buffering=0) as filler:
            for piece in (bytes(2**20), bytes(512)):
                try:
                    while filler.write(piece):
                        pass
                except OSError:
                    pass

    def free(self) -> None:
        """What an operator does."""
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.path / "filler"
