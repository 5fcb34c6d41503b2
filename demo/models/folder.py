"""A model folder that is there whole or not at all.

Keeps: a reader of the folder sees either nothing or the finished model, because it is built beside its
place, written through to the disk and renamed; a second build with the same inputs writes nothing, and
says so only after it has read every file again and compared its sha256.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# A leading dot: the demo's hub does not serve such files (demo/hub_files.py).
MANIFEST = ".manifest.json"


def build_once(folder: Path, inputs: Mapping[str, str], build: Callable[[Path], None]) -> bool:
    """Make `folder` by `build`, unless it already holds what `build` made from the same `inputs`.

    Args:
        folder: where the model shall lie. What lies there and is not whole is replaced.
        inputs: everything the result depends on (hashes, versions); compared with the manifest.
        build: fills the empty folder that it is given. What it raises leaves `folder` as it was.

    Returns:
        True when it was built, False when it was there and every file had its sha256.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _one_builder(folder):
        if is_whole(folder, inputs):
            return False
        _remove_leftovers(folder)
        staging = Path(tempfile.mkdtemp(prefix=_staging_prefix(folder), dir=folder.parent))
        try:
            build(staging)
            _seal(staging, inputs)
            _put_in_place(staging, folder)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    return True


def is_whole(folder: Path, inputs: Mapping[str, str]) -> bool:
    """Whether `folder` holds exactly the files of its manifest, made from `inputs`, with their sha256."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["inputs"] != dict(inputs):
            return False
        return bool(manifest["files"] == {name: sha256_of(folder / name) for name in _names(folder)})
    except (OSError, ValueError, KeyError):
        return False


def sha256_of(path: Path) -> str:
    """The sha256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON, the same bytes for equal values."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _names(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if path.name != MANIFEST)


def _seal(staging: Path, inputs: Mapping[str, str]) -> None:
    """Write the manifest; then everything to the disk, so that the rename cannot precede the bytes.

    safetensors makes its files 0600; models are no secret, and the hub may run as another user.
    """
    files = {name: sha256_of(staging / name) for name in _names(staging)}
    write_json(staging / MANIFEST, {"inputs": dict(inputs), "files": files})
    for path in [*staging.rglob("*"), staging]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        _fsync(path)


def _put_in_place(staging: Path, folder: Path) -> None:
    if folder.exists():
        # rename cannot replace a folder that holds files; a kill between the two renames leaves no
        # model, and the next build makes it again.
        broken = Path(tempfile.mkdtemp(prefix=_staging_prefix(folder), dir=folder.parent))
        folder.rename(broken)
        staging.rename(folder)
        shutil.rmtree(broken)
    else:
        staging.rename(folder)
    _fsync(folder.parent)


def _staging_prefix(folder: Path) -> str:
    return f".{folder.name}.building-"


def _remove_leftovers(folder: Path) -> None:
    """What a killed build left; nobody else builds now, because the caller holds the lock."""
    for leftover in folder.parent.glob(f"{_staging_prefix(folder)}*"):
        shutil.rmtree(leftover)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
