"""Small text files that a reader finds old or new, never torn, also after a crash."""

import os
import threading
from pathlib import Path

from tasks.node.processes import host


def replace_text(path: Path, text: str) -> None:
    """Put `text` at `path`: whole, durable, in one step for every reader.

    A killed writer leaves its draft beside the file; the next writer of that file on this host removes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    drafts = f".{path.name}.{host()}."
    _remove_abandoned(path.parent, drafts)
    # A thread's id is one of the system's, so it is unique on the host and /proc knows whether it lives.
    draft = path.with_name(f"{drafts}{threading.get_native_id()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_abandoned(folder: Path, drafts: str) -> None:
    # Not a glob: a name may hold its special characters.
    for name in os.listdir(folder):
        writer = name.removeprefix(drafts)
        if writer != name and writer.isdigit() and not Path("/proc", writer).exists():
            (folder / name).unlink(missing_ok=True)
