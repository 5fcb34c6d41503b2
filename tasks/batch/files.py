"""Files that are whole or not there, and that are recognised by their content."""

import json
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


def hash_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def describe(path: Path) -> dict[str, Any]:
    """Name, size and content hash of a file, as manifests hold them."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": hash_of(path)}


def damaged(folder: Path, described: Iterable[dict[str, Any]]) -> list[str]:
    """The names of those files that are missing in `folder` or hold something else than `describe` saw."""
    return [item["name"] for item in described if not _is_as_described(folder / item["name"], item)]


def write_json(path: Path, document: Any) -> None:
    """Put `document` at `path`: whole, durable, in one step for every reader."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, ensure_ascii=False, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None when it is not there or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def move_in(draft: Path, place: Path) -> None:
    """Make a finished file durable and put it in its place in one step."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(place)


def sync_folder(folder: Path) -> None:
    """Make the renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_as_described(path: Path, item: dict[str, Any]) -> bool:
    try:
        return (path.stat().st_size, hash_of(path)) == (item["bytes"], item["sha256"])
    except OSError:
        return False
