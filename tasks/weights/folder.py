"""A folder on this node as a source of weights, in the place of a repository on the hub.

Keeps: what the folder holds is named by the hash of its content, in the place of a commit, so that another content
is another download and another release; a file that changes while it is copied does not have its hash any more.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from tasks.errors import InputError, StageFailed
from tasks.weights import store
from tasks.weights.hub import RemoteFile

_CHUNK_BYTES = 4 * 2**20


def is_folder(repo: str) -> bool:
    """Whether `model.repo` names a folder of this node."""
    return repo.startswith("/")


def commit_of(folder: Path) -> str:
    """A name for the folder's content, of a commit's form.

    Raises:
        InputError: there is no such folder.
    """
    named = [[file.name, file.size, file.sha256] for file in files_of(folder)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:40]


def files_of(folder: Path) -> list[RemoteFile]:
    """Every file of the folder, hashed now; links that lead out of it are left out.

    Raises:
        InputError: there is no such folder.
    """
    if not folder.is_dir():
        raise InputError(f"model.repo: there is no folder {folder} on this node")
    root, paths = folder.resolve(), _paths(folder)
    return [
        RemoteFile(path.relative_to(root).as_posix(), path.stat().st_size, sha256, None)
        for path, sha256 in zip(paths, store.sha256_of_all(paths), strict=True)
    ]


def size_of(folder: Path) -> int:
    """Bytes of those files, which are not read."""
    return sum(path.stat().st_size for path in _paths(folder))


def fetch(folder: Path, file: RemoteFile, part: Path, on_bytes: Callable[[int], None]) -> None:
    """Bring `part` to the size of `file`, going on after the bytes it holds already.

    Raises:
        StageFailed: the file went away.
    """
    try:
        with (folder / file.name).open("rb") as source, part.open("ab") as target:
            source.seek(target.tell())
            while chunk := source.read(_CHUNK_BYTES):
                target.write(chunk)
                on_bytes(len(chunk))
    except FileNotFoundError:
        raise StageFailed(f"{folder / file.name} went away while it was copied: start another run") from None


def _paths(folder: Path) -> list[Path]:
    root = folder.resolve()
    return [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.resolve().is_relative_to(root) and not _is_hidden(path.relative_to(root))
    ]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
