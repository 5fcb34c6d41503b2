"""Model folders as the hub's repositories: files, git blob ids, sha256 and a commit.

Keeps: the commit is a hash of names and contents, so equal folders have equal commits on every machine,
and a changed byte changes the commit; no file is hashed twice while its size, modification time and
inode stay the same, also over restarts.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LFS_BYTES = 1_000_000  # larger files are LFS files, as are weights of any size
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class HubFile:
    """One file of a repository."""

    path: str  # in the repository, with forward slashes
    place: Path  # on this machine
    size_bytes: int
    sha256: str
    blob_id: str  # git's id of the file, or of its pointer when it is an LFS file
    lfs: bool

    @property
    def etag(self) -> str:
        """What the hub sends as ETag, or as X-Linked-Etag of an LFS file."""
        return self.sha256 if self.lfs else self.blob_id

    @property
    def pointer_bytes(self) -> int:
        """Size of the pointer that git holds in place of an LFS file."""
        return len(_lfs_pointer(self.sha256, self.size_bytes))


@dataclass(frozen=True)
class Snapshot:
    """What a repository holds at one moment."""

    commit: str  # 40 hexadecimal digits
    files: dict[str, HubFile]  # by path, in order of path


class Repository:
    """One model folder, read again at every request, because the demo builds models while the hub runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hashes = _Hashes(folder.parent / f".{folder.name}.hashes.json")
        self._lock = threading.Lock()  # two first requests hash a file once

    def snapshot(self) -> Snapshot:
        """The files as they are now; the first time each is read once, to hash it."""
        with self._lock:
            files = {path: self._file(path, place) for path, place in _served_files(self._folder)}
            self._hashes.save()
        listing = "".join(f"{file.blob_id} {path}\0" for path, file in files.items())
        return Snapshot(hashlib.sha1(listing.encode()).hexdigest(), files)

    def _file(self, path: str, place: Path) -> HubFile:
        size_bytes, sha256, blob_id = self._hashes.of(place)
        lfs = size_bytes > LFS_BYTES or path.endswith(".safetensors")
        if lfs:
            blob_id = _git_blob_id(_lfs_pointer(sha256, size_bytes))
        return HubFile(path, place, size_bytes, sha256, blob_id, lfs)


class _Hashes:
    """sha256 and git blob id of files, kept in a JSON file by size, modification time and inode."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._known: dict[str, list[int | str]] = {}
        self._changed = False
        with suppress(OSError, ValueError):  # never written, or spoiled: hashed again
            self._known = json.loads(store.read_text())

    def of(self, place: Path) -> tuple[int, str, str]:
        """Size in bytes, sha256 and git blob id of the file at `place`."""
        status = place.stat()
        identity = [status.st_size, status.st_mtime_ns, status.st_ino]
        entry = self._known.get(str(place))
        if entry is None or entry[:3] != identity:
            entry = [*identity, *_hash_file(place, status.st_size)]
            self._known[str(place)] = entry
            self._changed = True
        return status.st_size, str(entry[3]), str(entry[4])

    def save(self) -> None:
        if not self._changed:
            return
        descriptor, draft = tempfile.mkstemp(prefix=self._store.name, dir=self._store.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump(self._known, file)
        os.replace(draft, self._store)
        self._changed = False


def _hash_file(place: Path, size_bytes: int) -> tuple[str, str]:
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size_bytes)
    with place.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha256.update(chunk)
            blob.update(chunk)
    return sha256.hexdigest(), blob.hexdigest()


def _git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _lfs_pointer(sha256: str, size_bytes: int) -> bytes:
    """What git itself holds for an LFS file: github.com/git-lfs/git-lfs, docs/spec.md."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size_bytes}\n".encode()


def _served_files(folder: Path) -> list[tuple[str, Path]]:
    places = (place for place in folder.rglob("*") if place.is_file())
    visible = (place for place in places if not _hidden(place.relative_to(folder)))
    return sorted((place.relative_to(folder).as_posix(), place) for place in visible)


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)
