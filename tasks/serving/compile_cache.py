"""Compiled kernels, kept across workers and runs: a 9B model starts in 60 s with them and in 200 s without.

A cache belongs to what its contents depend on: vLLM's version, the model's architecture and sizes, the kind of
device, and the flags that shape kernels. One that breaks a start is dropped, and the start is tried again.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.serving import flags
from tasks.serving.launch import Slot
from tasks.settings import Settings
from tasks.spec import Serving

log = logging.getLogger(__name__)

_USED = "last-used"
_NOT_SHAPING = frozenset({"architectures", "_name_or_path", "transformers_version", "torch_dtype"})
"""Of config.json: who wrote it, or named already."""


def folder(settings: Settings, serving: Serving, slot: Slot, release: Path, device: str) -> Path:
    """Where the cache of such workers is; it need not exist yet.

    Args:
        device: the GPU's name as the driver tells it, or `cpu`.
    """
    config = _config(release)
    architecture = "-".join(config.get("architectures") or ["unknown"])
    depends_on = {
        "config": {name: value for name, value in config.items() if name not in _NOT_SHAPING},
        "device": device,
        "ranks": len(slot.uuids),
        "serving": serving.model_dump(
            mode="json",
            exclude={"kv_cache_memory_mb", "gpu_memory_utilization", "min_workers"},
        ),
    }
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:12]
    version = flags.version(settings.serving_flags)
    return settings.home / "cache" / f"vllm-{version}" / f"{architecture}-{_word(device)}-{digest}"


def use(cache: Path) -> bool:
    """Note that the cache is used now; returns whether it holds something already."""
    warm = is_warm(cache)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / _USED).touch()
    return warm


def is_warm(cache: Path) -> bool:
    """Whether a worker has left something in it."""
    with suppress(OSError):
        return any(entry.name != _USED for entry in os.scandir(cache))
    return False


def drop(cache: Path) -> None:
    """Remove it at once for whoever comes; what is open in other workers stays readable for them."""
    aside = cache.with_name(f".{cache.name}.{os.getpid()}.{time.monotonic_ns()}")
    with suppress(FileNotFoundError):
        cache.rename(aside)
        log.warning("the compile cache %s is dropped: a worker could not start with it", cache)
        shutil.rmtree(aside, ignore_errors=True)


def forget_old(settings: Settings) -> None:
    """Remove caches that no worker has used for long, and what a killed `drop` left."""
    oldest = time.time() - settings.cache_retention_d * 86400
    for marker in (settings.home / "cache").glob(f"vllm-*/*/{_USED}"):
        with suppress(OSError):
            if marker.stat().st_mtime < oldest or marker.parent.name.startswith("."):
                shutil.rmtree(marker.parent, ignore_errors=True)


def _config(release: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((release / "config.json").read_text()))
    except (OSError, ValueError):
        return {}


def _word(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)
