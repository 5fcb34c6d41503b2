"""Checks of the pinned model: what is downloaded fits the conversion, what is not fits the disk."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tasks.contract import Context
from tasks.errors import StageFailed, Unavailable
from tasks.preflight.check import Check, look
from tasks.weights import hub, store, tensors
from tasks.weights.folder import is_folder, size_of

_GIB = 1 << 30

_ROOM_FOR_A_MODEL = 2.2
"""Bytes on disk over bytes of the repository: the download, a release of at most its size, and staging."""


def model_checks(context: Context) -> list[Check]:
    """What can be known of the model before it is downloaded, and more once it is."""
    checks = [look("disk", "room for the download and the release", lambda: _disk(context))]
    if context.run.spec.convert.scheme == "awq" and _is_downloaded(context):
        checks.append(look("convert.group_size", "divides every layer", lambda: _group_size(context)))
    return checks


@dataclass(frozen=True)
class OnDisk:
    """A checkpoint whose size is known."""

    folder: Path
    weights_bytes: int
    """Of the release; a guess where only the download is there."""


def release_on_disk(context: Context) -> OnDisk | None:
    """The release, or the download with a guess of what it becomes; None when neither is there."""
    settings, spec, pins = context.settings, context.run.spec, context.run.pins
    for release in [store.release_folder(settings, pins["release_id"])] if "release_id" in pins else []:
        manifest = store.read_manifest(release / store.MANIFEST)
        if manifest is not None:
            return OnDisk(release, manifest.bytes)
    if "commit" not in pins:
        return None
    folder = store.download_folder(settings, spec.model.repo, pins["commit"])
    manifest = store.read_manifest(folder / store.DOWNLOAD_MANIFEST)
    if manifest is None:
        return None
    return OnDisk(folder, int(manifest.bytes * _SHARE[spec.convert.scheme]))


_SHARE = {"none": 1.0, "fp8": 0.6, "fp8_block": 0.6, "awq": 0.45}
"""Bytes of a release over those of its 16-bit download, rounded up: embeddings stay as they are."""


def _disk(context: Context) -> str:
    kept = context.settings.store
    there = next(place for place in (kept, *kept.parents) if place.exists())
    free = shutil.disk_usage(there).free
    pins = context.run.pins
    if store.read_manifest(store.release_folder(context.settings, pins["release_id"]) / store.MANIFEST):
        return f"{free / _GIB:.1f} GiB free, and the release is there"
    size = _model_bytes(context)
    if size is None:
        return f"{free / _GIB:.1f} GiB free; how large the model is, is not known without the hub"
    wanted = int(size * (_ROOM_FOR_A_MODEL - (1 if _is_downloaded(context) else 0)))
    if free < wanted:
        raise StageFailed(
            f"{free / _GIB:.1f} GiB are free in {there}, and a model of {size / _GIB:.1f} GiB wants "
            f"{wanted / _GIB:.1f} GiB: remove old releases or downloads, or move QWEN_PIPELINE_HOME to a "
            f"larger disk"
        )
    return f"{free / _GIB:.1f} GiB free, {wanted / _GIB:.1f} GiB wanted"


def _model_bytes(context: Context) -> int | None:
    """Size of the pinned repository or folder; None when nobody can say now, which `download` explains if it must."""
    settings, repo, commit = context.settings, context.run.spec.model.repo, context.run.pins["commit"]
    manifest = store.read_manifest(store.download_folder(settings, repo, commit) / store.DOWNLOAD_MANIFEST)
    if manifest is not None:
        return manifest.bytes
    if is_folder(repo):
        return size_of(Path(repo))
    if settings.hub_offline:
        return None
    try:
        return sum(file.size for file in hub.files_of(repo, commit, settings))
    except Unavailable:
        return None


def _is_downloaded(context: Context) -> bool:
    folder = store.download_folder(context.settings, context.run.spec.model.repo, context.run.pins["commit"])
    return store.read_manifest(folder / store.DOWNLOAD_MANIFEST) is not None


def _group_size(context: Context) -> str:
    spec = context.run.spec
    folder = store.download_folder(context.settings, spec.model.repo, context.run.pins["commit"])
    tensors.check_group_size(folder, spec.convert.group_size)
    return str(spec.convert.group_size)
