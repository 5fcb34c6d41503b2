"""Memory is reckoned before a conversion starts, and what is reckoned holds."""

import json
import re
import subprocess
from math import prod
from pathlib import Path

import pytest

from tasks.errors import StageFailed
from tasks.node import processes
from tasks.settings import Settings
from tasks.weights import memory, tensors
from tests.weights.world import World, write_safetensors

HERE = Path(__file__).parent


def a_model(layers: int, width: int) -> dict[str, tensors.Tensor]:
    stored = {
        f"model.layers.{index}.mlp.{name}.weight": tensors.Tensor(
            f"{index}.safetensors", "BF16", (width, width)
        )
        for index in range(layers)
        for name in ("up_proj", "down_proj")
    }
    return stored | {"model.embed_tokens.weight": tensors.Tensor("0.safetensors", "BF16", (1000, width))}


def test_fp8_takes_no_more_for_more_files_and_awq_keeps_what_does_not_fit_on_the_disk() -> None:
    few, many = a_model(4, 1024), a_model(400, 1024)

    assert memory.need(few, "fp8", 1000).least_bytes == memory.need(many, "fp8", 1000).least_bytes
    small, large = (memory.need(a_model(layers, 1024), "awq", 1000) for layers in (1000, 2000))
    assert small.least_bytes == large.least_bytes
    assert large.model_bytes > small.model_bytes
    assert large.on_disk_bytes(large.least_bytes) == large.model_bytes
    assert large.on_disk_bytes(large.least_bytes + large.model_bytes) == 0


def test_a_file_counts_twice_and_a_layer_thrice() -> None:
    width = 16_384
    model = a_model(2, width)
    layer_bytes = 2 * width * width * 4

    fp8, awq = (memory.need(model, scheme, 0).least_bytes for scheme in ("fp8", "awq"))

    assert fp8 >= 2 * max(
        sum(t.bytes for t in model.values() if t.file == file) for file in ("0.safetensors",)
    )
    assert awq >= 3 * layer_bytes


def test_a_conversion_that_cannot_fit_is_refused_with_numbers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 123_000_000)
    world.start(scheme="fp8")
    world.execute("download")

    with pytest.raises(
        StageFailed, match=r"to fp8 needs at least \d\.\d\d GB of memory and 0\.12 GB are free"
    ):
        world.execute("convert")

    assert world.staging() == []
    assert not (world.settings.logs / "run-1").exists()


def test_fp8_streams_in_less_than_two_files_and_a_constant(tmp_path: Path) -> None:
    """Four files of 96 MiB: were they held at once, with what comes out, the peak would be far over what it may be."""
    file_bytes, files = 96 * 2**20, 4
    base = tmp_path / "base"
    base.mkdir()
    matrix, index = ("BF16", (1024, 4096)), {}
    for number in range(files):
        names = [
            f"model.layers.{number}.mlp.experts.{one}.up_proj.weight" for one in range(file_bytes // 2**23)
        ]
        file = f"model-{number}.safetensors"
        write_safetensors(base / file, dict.fromkeys(names, matrix))
        index |= dict.fromkeys(names, file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (base / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    )

    said = subprocess.run(
        [Settings().python_convert, HERE / "peak_memory.py", base, tmp_path / "made"],
        check=True,
        env=processes.environment("tests/peak", {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}),
        capture_output=True,
        text=True,
        timeout=600,
    )

    before, peak = (int(found) for found in re.findall(r"peak (\d+)", said.stdout))
    assert peak - before < 2 * file_bytes + 128 * 2**20


@pytest.mark.everything
def test_awq_with_little_memory_takes_little_and_makes_the_same(tmp_path: Path) -> None:
    """Twelve layers of 50 MB in float32, of which nearly all lie on the disk the second time."""
    peaks = {}
    for way, memory_bytes in (("memory", 2**40), ("disk", 100_000_000)):
        made = tmp_path / way / "awq"
        made.parent.mkdir()
        said = subprocess.run(
            [
                Settings().python_convert,
                HERE / "peak_memory_awq.py",
                tmp_path / "base",
                made.parent,
                str(memory_bytes),
            ],
            check=True,
            env=processes.environment("tests/peak", {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}),
            capture_output=True,
            text=True,
            timeout=800,
        )
        (peak,) = re.findall(r"^peak (\d+)", said.stdout, re.MULTILINE)
        peaks[way] = int(peak)
    print(json.dumps({"peak_bytes": peaks}))

    whole = sum(prod(tensor.shape) * 4 for tensor in tensors.read(tmp_path / "base").values())
    assert peaks["disk"] < peaks["memory"] - whole // 2
    made_of = [{path.name: path.read_bytes() for path in (tmp_path / way / "awq").iterdir()} for way in peaks]
    assert made_of[0] == made_of[1]
