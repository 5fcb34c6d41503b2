"""Compile caches: whose they are, and what becomes of one that is broken or old."""

import json
import os
from pathlib import Path

import pytest

from tasks.serving import compile_cache
from tasks.serving.launch import Slot
from tasks.settings import Settings
from tasks.spec import Serving

GPU = Slot("gpus-0", "gpus", uuids=("GPU-1",))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A deployment with vLLM 1.2.3."""
    known = tmp_path / "flags.json"
    known.write_text('{"version": "1.2.3", "flags": []}')
    return Settings(home=tmp_path, serving_flags=known)


def a_release(tmp_path: Path, name: str, **config: object) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **config}))
    return folder


def test_a_cache_is_shared_by_what_compiles_alike_and_by_nothing_else(
    settings: Settings, tmp_path: Path
) -> None:
    small, same, wide = (
        a_release(tmp_path, name, hidden_size=size) for name, size in (("a", 1), ("b", 1), ("c", 2))
    )

    def folder(
        release: Path = small, slot: Slot = GPU, device: str = "NVIDIA H200", **serving: object
    ) -> Path:
        return compile_cache.folder(settings, Serving.model_validate(serving), slot, release, device)

    assert folder() == folder(same)
    assert folder() == folder(gpu_memory_utilization=0.5), "how much memory there is changes no kernel"
    others = [
        folder(wide),
        folder(device="NVIDIA A100"),
        folder(slot=Slot("gpus-0", "gpus", uuids=("GPU-1", "GPU-2"))),
        folder(max_num_seqs=7),
        folder(extra_args={"quantization": "fp8"}),
    ]
    assert len({folder(), *others}) == 1 + len(others)
    assert folder().parent.name == "vllm-1.2.3"
    assert "Qwen3ForCausalLM-NVIDIA_H200" in folder().name


def test_a_cache_is_warm_once_a_worker_left_something(settings: Settings, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "vllm-1.2.3" / "some"
    assert not compile_cache.use(cache)
    assert not compile_cache.use(cache), "our own mark is nothing"
    (cache / "triton").mkdir()
    assert compile_cache.use(cache)
    compile_cache.drop(cache)
    assert not cache.exists()
    assert os.listdir(cache.parent) == []
    compile_cache.drop(cache)


def test_only_caches_that_nobody_uses_are_forgotten(settings: Settings, tmp_path: Path) -> None:
    old, new = (settings.home / "cache" / "vllm-1.2.3" / name for name in ("old", "new"))
    for cache in (old, new):
        compile_cache.use(cache)
    long_ago = 86400.0
    os.utime(old / "last-used", (long_ago, long_ago))
    compile_cache.forget_old(settings)
    assert not old.exists()
    assert new.exists()
