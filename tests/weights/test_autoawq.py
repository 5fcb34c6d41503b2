"""The other converter: for whom it is, and what it says to others. It converts only where its environment was made."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tasks.errors import InputError, StageFailed
from tasks.node import processes
from tasks.settings import Settings
from tasks.spec.model import Convert, Gate
from tasks.weights import autoawq, calibration, conversion, converting, gate, recipes, store, tensors
from tasks.weights.scales import SCALES
from tasks.weights.verify import verify
from tests.weights.converted import measurements, run_in_converting_environment
from tests.weights.world import World, write_checkpoint

ASKED = Convert(converter="autoawq", group_size=64)


def test_an_architecture_that_it_does_not_know_is_refused_with_the_other_converters_name(
    world: World,
) -> None:
    write_checkpoint(world.repositories / "owner/hybrid", architectures=["Qwen3_5ForCausalLM"])
    python = a_python_with_autoawq(world.home.parent)
    with_autoawq = world.settings_with(python_autoawq=python)
    world.settings = with_autoawq
    world.start(repo="owner/hybrid", scheme="awq", group_size=64, converter="autoawq")
    world.execute("download")

    with pytest.raises(
        InputError,
        match=r"convert\.converter: autoawq knows Qwen2.*, Qwen3.*, and .* Qwen3_5ForCausalLM: take llm-compressor",
    ):
        world.execute("convert")


def test_a_layout_that_it_has_not_is_refused() -> None:
    asked = ASKED.model_copy(update={"symmetric": True})

    with pytest.raises(InputError, match=r"convert\.symmetric: .*llm-compressor"):
        autoawq.check(asked, {"architectures": ["Qwen2ForCausalLM"]}, Settings())


def test_a_missing_environment_says_how_it_is_made(world: World, tmp_path: Path) -> None:
    absent = world.settings_with(python_autoawq=tmp_path / "absent/bin/python")

    with pytest.raises(StageFailed, match="make setup WITH=autoawq"):
        autoawq.check(ASKED, {"architectures": ["Qwen2ForCausalLM"]}, absent)
    world.settings = absent
    with pytest.raises(StageFailed, match="make setup WITH=autoawq"):
        world.start(scheme="awq", converter="autoawq")


def test_its_release_is_another_than_the_other_converters(world: World) -> None:
    world.settings = world.settings_with(python_autoawq=a_python_with_autoawq(world.home.parent))
    asked = {"scheme": "awq", "group_size": 64}

    one, other = world.start("run-1", **asked), world.start("run-2", **asked, converter="autoawq")

    assert one.pins["release_id"] != other.pins["release_id"]
    assert other.pins["versions"]["autoawq: autoawq"] == "1.0"


@pytest.mark.skipif(
    not os.access(Settings().python_autoawq, os.X_OK), reason="make setup WITH=autoawq was not asked for"
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_what_it_converts_is_read_and_passes_the_gate(conversions: Path, tmp_path: Path, name: str) -> None:
    base, work = conversions / "base" / name, tmp_path / "work"
    work.mkdir()
    recipe = recipes.of(tensors.read_config(base))
    job = converting.Job(
        source=str(base),
        made=str(work / "made"),
        scheme="awq",
        candidates=[],
        group_size=64,
        symmetric=False,
        ignored=list(recipe.ignored),
        loader=recipe.loader,
        texts=calibration.texts(None, 1024),
        tokens=1024,
        sample_tokens=calibration.SAMPLE_TOKENS,
        n_grid=4,
        memory_bytes=2**40,
        progress=str(work / "progress.json"),
    )
    (work / "job.json").write_text(job.dumps())
    subprocess.run(
        [Settings().python_autoawq, "-m", "tasks.weights.autoawq_converting", work / "job.json"],
        check=True,
        env=processes.environment("tests/autoawq", {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}),
        stdout=subprocess.DEVNULL,
        timeout=600,
    )
    made, release = work / "made" / "awq", work / "release"
    assert (made / SCALES).exists()
    run_in_converting_environment("measure_one.py", base, made, work / "measured.json")
    (measured,) = measurements(work / "measured.json").values()
    assert measured.problems(gate.limits_of("awq", Gate())) == []

    release.mkdir()
    conversion.assemble(base, store.describe(base, {}), made, release)
    verify(base, release, autoawq.LAYOUT, 64, False, recipe)
    quantization = json.loads((release / "config.json").read_text())["quantization_config"]
    assert (quantization["quant_method"], quantization["version"]) == ("awq", "gemm")


def a_python_with_autoawq(folder: Path) -> Path:
    """An interpreter that is never run, beside the names and versions that a release is named by."""
    python = folder / "autoawq/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    for name in ("autoawq", "torch", "transformers"):
        about = folder / f"autoawq/lib/python3.11/site-packages/{name}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    return python
