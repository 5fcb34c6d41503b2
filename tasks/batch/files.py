"""Files that are whole or not there, and that are recognised by their content."""

import json
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from tasks.node.atomic import replace_text

_CHUNK_BYTES = 1 << 20


def hash_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def holds(path: Path, sha256: str) -> bool:
    """Whether a file is there and its content has this hash."""
    try:
        return hash_of(path) == sha256
    except OSError:
        return False


def describe(path: Path) -> dict[str, Any]:
    """Name, size and content hash of a file, as manifests hold them."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": hash_of(path)}


def damaged(folder: Path, described: Iterable[dict[str, Any]]) -> list[str]:
    """The names of those files that are missing in `folder` or hold something else than `describe` saw."""
    return [item["name"] for item in described if not _is_as_described(folder / item["name"], item)]


def write_json(path: Path, document: Any) -> None:
    """Put `document` at `path`: whole, durable, in one step for every reader."""
    replace_text(path, json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


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


def _is_as_described(path: Path, item: dict[str, Any]) -> bool:
    try:
        return (path.stat().st_size, hash_of(path)) == (item["bytes"], item["sha256"])
    except OSError:
        return False
