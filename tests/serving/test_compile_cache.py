"""Compile caches: whose they are, and what becomes of one that is broken or old."""

import json
import os
from pathlib import Path

import pytest

from tasks.serving import compile_cache
from tasks.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A deployment with vLLM 1.2.3."""
    known = tmp_path / "flags.json"
    known.write_text('{"version": "1.2.3", "flags": []}')
    return Settings(home=tmp_path, serving_flags=known)


def a_release(tmp_path: Path, name: str, **config: object) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]} | config))
    return folder


def test_a_cache_is_shared_by_all_settings_of_an_architecture_on_a_device(
    settings: Settings, tmp_path: Path
) -> None:
    plain = a_release(tmp_path, "a", hidden_size=1)
    fp8 = a_release(tmp_path, "b", hidden_size=1, quantization_config={"format": "float-quantized"})
    other = a_release(tmp_path, "c", architectures=["Qwen3MoeForCausalLM"])

    def folder(release: Path = plain, device: str = "NVIDIA H200") -> Path:
        return compile_cache.folder(settings, release, device)

    assert folder() == folder(fp8)
    assert len({folder(), folder(other), folder(device="NVIDIA A100")}) == 3
    assert folder().parent.name == "vllm-1.2.3"
    assert folder().name == "Qwen3ForCausalLM-NVIDIA_H200"


@pytest.mark.parametrize(
    "config", ["", "[]", "{}", '{"architectures": null}', '{"architectures": "../../x"}']
)
def test_a_config_that_names_no_architecture_has_a_cache_too(
    settings: Settings, tmp_path: Path, config: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    found = compile_cache.folder(settings, tmp_path, "cpu")
    assert found.parent == settings.home / "cache" / "vllm-1.2.3"


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
