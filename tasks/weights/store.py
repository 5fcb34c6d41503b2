"""The store: folders that are whole and proven, or not there.

    store/downloads/OWNER--NAME/COMMIT/    the repository's files at that commit
    store/releases/RELEASE_ID/             a converted checkpoint
    store/staging/                         what is being made; nobody reads it but its maker

Keeps:
- A folder becomes visible by one rename, after its manifest and all its bytes are on the disk. A broken
  folder is exchanged for a whole one in one step, so a reader sees either, never half of one.
- A manifest names every file with size and sha256, and never changes once it is visible.
- Checking a folder is quick while nothing touches it: a file is hashed again only when its size, modification
  time or inode is not the one it had when its hash was last proven.
"""

import ctypes
import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tasks.errors import InputError, StageFailed
from tasks.node.atomic import replace_text
from tasks.settings import Settings

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
DOWNLOAD_MANIFEST = ".manifest.json"
"""Dotted, because a repository may hold a `manifest.json` of its own; its dotted files are never fetched."""

DOWNLOAD_STAGING = "download-"
"""Begins the name of a download's staging folder; a release's is RELEASE_ID.ATTEMPT."""

_CHUNK_BYTES = 4 * 2**20
"""Large enough that hashing lets other threads run (hashlib releases the lock), small enough for the
processor's cache."""

_HASHING_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class File:
    """One file of a manifest."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder holds. Equal inputs give equal bytes of it: no time, host or path is in it."""

    about: Mapping[str, Any]
    """Where the files come from: repository and commit, or a release's fingerprint and metrics."""
    files: Mapping[str, File] = field(default_factory=dict)
    """By name relative to the folder, with forward slashes."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files.values())

    def dumps(self) -> str:
        """As JSON, sorted."""
        files = {name: {"size": file.size, "sha256": file.sha256} for name, file in self.files.items()}
        return json.dumps({"version": 1, **self.about, "files": files}, indent=1, sort_keys=True) + "\n"


def download_folder(settings: Settings, repo: str, commit: str) -> Path:
    """Where a repository's files at a commit are."""
    return settings.store / "downloads" / repo.replace("/", "--") / commit


def release_folder(settings: Settings, release_id: str) -> Path:
    """Where a release is."""
    return settings.store / "releases" / release_id


def releases(settings: Settings) -> dict[str, Manifest]:
    """The releases in the store by id, by their manifests alone: nothing is hashed."""
    found = {}
    for path in sorted((settings.store / "releases").glob("*/")):
        manifest = read_manifest(path / MANIFEST)
        if manifest is not None:
            found[path.name] = manifest
    return found


def read_manifest(path: Path) -> Manifest | None:
    """The manifest at `path`; None when it is missing or not one."""
    try:
        document = json.loads(path.read_text())
        version, files = document.pop("version"), document.pop("files")
        if version != 1:
            return None
        parsed = {
            safe_name(name): File(int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InputError):
        return None
    return Manifest(document, parsed)


def safe_name(name: str) -> str:
    """`name` again, if it stays inside the folder it is put into.

    Raises:
        InputError: it is absolute, climbs out, or is written so that systems read it differently.
    """
    parts = PurePosixPath(name).parts
    plain = name == "/".join(parts) and not name.startswith("/")
    if not parts or not plain or ".." in parts or "\\" in name or any(ord(sign) < 32 for sign in name):
        raise InputError(
            f"model.repo: the repository names a file {name!r}, which would be written outside of its "
            f"folder; such a repository is refused"
        )
    return name


def wrong_files(folder: Path, manifest: Manifest, settings: Settings, *, distrust: bool = False) -> list[str]:
    """What differs in `folder` from the manifest: files missing, with other bytes, or not in it; sorted.

    Also notes, for the next check, how the right ones look from outside.

    Args:
        distrust: hash every file, whatever was noted.
    """
    proven = {} if distrust else _recall(folder, settings)
    doubtful: list[str] = []
    seen: dict[str, list[int]] = {}
    wrong = [name for name in _names(folder) if name not in manifest.files]
    for name, file in manifest.files.items():
        look = _look(folder / name)
        if look is None or look[0] != file.size:
            wrong.append(name)
        elif proven.get(name) == look:
            seen[name] = look
        else:
            doubtful.append(name)
            seen[name] = look
    hashes = sha256_of_all(folder / name for name in doubtful)
    for name, sha256 in zip(doubtful, hashes, strict=True):
        if sha256 != manifest.files[name].sha256:
            wrong.append(name)
            del seen[name]
    if seen != proven:
        _remember(folder, seen, settings)
    return sorted(wrong)


def sha256_of_all(paths: Iterable[Path], on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """The sha256 of each file in hexadecimal, several at once; "" for one that cannot be read."""
    with ThreadPoolExecutor(_HASHING_THREADS, "hash") as threads:
        return list(threads.map(lambda path: _digest(path, hashlib.sha256(), on_bytes), paths))


def git_blob_id(path: Path) -> str:
    """What git calls the content of the file: sha1 over `blob SIZE NUL` and the bytes."""
    return _digest(path, hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False), None)


def describe(folder: Path, about: Mapping[str, Any]) -> Manifest:
    """The manifest of what is in `folder` now, every byte read."""
    names = _names(folder)
    paths = [folder / name for name in names]
    files = [
        File(path.stat().st_size, sha256) for path, sha256 in zip(paths, sha256_of_all(paths), strict=True)
    ]
    return Manifest(about, dict(zip(names, files, strict=True)))


def publish(staging: Path, folder: Path, manifest_name: str, manifest: Manifest, settings: Settings) -> None:
    """Make `staging`, whose files were just proven to be the manifest's, visible as `folder`.

    What was there before is exchanged in the same instant and then deleted. Killed at any point, `folder` is
    either as before or whole, and what remains is in the store's staging.
    """
    (staging / manifest_name).write_text(manifest.dumps())
    for path in sorted(staging.rglob("*")):
        _sync(path)
    _sync(staging)
    folder.parent.mkdir(parents=True, exist_ok=True)
    looks = {name: look for name in manifest.files if (look := _look(staging / name)) is not None}
    if folder.exists():
        _exchange(staging, folder)
    else:
        os.rename(staging, folder)
    _sync(folder.parent)
    _remember(folder, looks, settings)
    remove(staging)


def put(source: Path, target: Path) -> None:
    """Make `target` the same file as `source` without copying bytes; a copy where that is not possible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)


def remove(folder: Path) -> None:
    """Delete a folder of the staging area. A converter that is dying in it may still add a file."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    raise StageFailed(
        f"{folder} cannot be deleted; something keeps writing there or its permissions forbid it"
    )


def require_space(settings: Settings, needed_bytes: int, what: str) -> None:
    """Refuse to start what cannot be finished.

    Raises:
        StageFailed: the store's file system has less than `needed_bytes` free.
    """
    settings.store.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(settings.store).free
    if free < needed_bytes:
        raise StageFailed(
            f"{what} needs {needed_bytes / 1e9:.2f} GB in {settings.store} and {free / 1e9:.2f} GB are free: "
            f"remove old releases or downloads, or set QWEN_PIPELINE_HOME to a larger disk"
        )


def _names(folder: Path) -> list[str]:
    """Everything in the folder that is not a folder, but for its manifest; sorted."""
    found = (
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if not path.is_dir() or path.is_symlink()
    )
    return sorted(name for name in found if name not in (MANIFEST, DOWNLOAD_MANIFEST))


def _digest(path: Path, digest: Any, on_bytes: Callable[[int], None] | None) -> str:
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(view[:count])
                if on_bytes is not None:
                    on_bytes(count)
    except OSError:
        return ""
    return str(digest.hexdigest())


def _look(path: Path) -> list[int] | None:
    """[size, modification time in ns, inode]; None for what is not a plain file (a link is not)."""
    try:
        stat = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    if not os.path.isfile(path) or os.path.islink(path):
        return None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _looks_file(folder: Path, settings: Settings) -> Path:
    name = "--".join(folder.relative_to(settings.store).parts)
    return settings.store / "proven" / f"{name}.json"


def _recall(folder: Path, settings: Settings) -> dict[str, list[int]]:
    try:
        recalled = json.loads(_looks_file(folder, settings).read_text())
    except (OSError, ValueError):
        return {}
    return recalled if isinstance(recalled, dict) else {}


def _remember(folder: Path, looks: Mapping[str, list[int]], settings: Settings) -> None:
    # Beside the folder and not in it: a release never changes. Lost, it costs one full hashing: a full disk
    # must not keep anybody from reading what is whole.
    try:
        replace_text(_looks_file(folder, settings), json.dumps(looks, sort_keys=True))
    except OSError as error:
        log.warning("that %s is right could not be noted and will be found out again: %s", folder, error)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step: renameat2(2) with RENAME_EXCHANGE, which Python does not offer."""
    at_cwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) != 0:
        number = ctypes.get_errno()
        raise StageFailed(
            f"{other} is damaged and could not be exchanged for a whole one: {os.strerror(number)}. The "
            f"store needs a local file system that knows renameat2 (ext4, xfs, btrfs, tmpfs)"
        )
