"""Compiled kernels, kept across workers and runs: a 9B model starts in 60 s with them and in 200 s without.

A cache belongs to vLLM's version, the model's architecture and the kind of device, and to nothing finer: vLLM,
torch and Triton name what they keep by the hash of all that it depends on, and most of it serves every
setting. On an H200 (vLLM 0.26.0) a worker with FP8 weights started in 100 s, and an engine with twice the
sequences in 62 s, from what bfloat16 workers had left; with nothing it takes 175 s. A cache that breaks a
start is dropped, and the start is tried again.
"""

import json
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from tasks.serving import flags
from tasks.settings import Settings

log = logging.getLogger(__name__)

_USED = "last-used"


def folder(settings: Settings, release: Path, device: str) -> Path:
    """Where the cache of such workers is; it need not exist yet.

    Args:
        device: the GPU's name as the driver tells it, or `cpu`.
    """
    version = flags.version(settings.serving_flags)
    return settings.home / "cache" / f"vllm-{version}" / f"{_architecture(release)}-{_word(device)}"


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


def _architecture(release: Path) -> str:
    try:
        names = json.loads((release / "config.json").read_text())["architectures"]
        return _word("-".join(names))
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def _word(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)
