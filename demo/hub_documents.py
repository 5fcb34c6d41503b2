"""The JSON documents that the hub's API answers with."""

from pathlib import PurePosixPath
from typing import Any

from demo.hub_files import HubFile, Snapshot


def model_info(repo: str, snapshot: Snapshot, *, blobs: bool) -> dict[str, Any]:
    """What describes a repository; `blobs` adds size and hashes of its files."""
    siblings = [
        {"rfilename": path, **(_sibling_blob(file) if blobs else {})} for path, file in snapshot.files.items()
    ]
    return {
        "id": repo,
        "modelId": repo,
        "author": repo.partition("/")[0],
        "sha": snapshot.commit,
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": [],
        "siblings": siblings,
    }


def tree(snapshot: Snapshot, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    """The entries below `folder` ("" for all), folders before files; none when there is no such folder.

    One page: no folder here is large.
    """
    prefix = f"{folder}/" if folder else ""
    inside = {path: file for path, file in snapshot.files.items() if path.startswith(prefix)}
    folders = {str(parent) for path in inside for parent in PurePosixPath(path).parents if str(parent) != "."}
    entries: list[dict[str, Any]] = [
        {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
        for name in sorted(folders)
        if name.startswith(prefix)
    ]
    entries += [_tree_file(file) for file in inside.values()]
    return [entry for entry in entries if recursive or "/" not in entry["path"].removeprefix(prefix)]


def _sibling_blob(file: HubFile) -> dict[str, Any]:
    blob: dict[str, Any] = {"size": file.size_bytes, "blobId": file.blob_id}
    if file.lfs:
        blob["lfs"] = {"sha256": file.sha256, "size": file.size_bytes, "pointerSize": file.pointer_bytes}
    return blob


def _tree_file(file: HubFile) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "file",
        "path": file.path,
        "size": file.size_bytes,
        "oid": file.blob_id,
    }
    if file.lfs:
        entry["lfs"] = {"oid": file.sha256, "size": file.size_bytes, "pointerSize": file.pointer_bytes}
    return entry
