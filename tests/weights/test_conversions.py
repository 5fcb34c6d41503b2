"""The real converter on tiny checkpoints of every architecture; its stage killed, shared, repeated."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks.node import processes
from tasks.settings import Settings
from tasks.weights import conversion, recipes, store, tensors
from tasks.weights.verify import verify, verify_carried_over
from tests.runs import outputs, wait_until
from tests.weights.world import REPO, World

HERE = Path(__file__).parent
NAMES = ("qwen2", "qwen3", "qwen3_5", "qwen3_5_vl")
SCHEMES = ("fp8", "fp8_block", "awq")


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `base/NAME` and `made/NAME-SCHEME`."""
    folder = tmp_path_factory.mktemp("conversions")
    subprocess.run(
        [Settings().python_convert, HERE / "convert_all.py", folder],
        check=True,
        env=processes.environment("tests/convert_all", {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}),
        stdout=subprocess.DEVNULL,
        timeout=600,
    )
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_converts_with_every_scheme(
    conversions: Path, tmp_path: Path, name: str, scheme: str
) -> None:
    base, release = conversions / "base" / name, tmp_path / "release"
    made = shutil.copytree(conversions / "made" / f"{name}-{scheme}", tmp_path / "made")
    base_manifest = store.describe(base, {})
    release.mkdir()

    conversion.assemble(base, base_manifest, made, release)

    recipe = recipes.of(tensors.read_config(base))
    verify(base, release, scheme, 64, recipe)
    manifest = store.describe(release, {})
    verify_carried_over(base_manifest, manifest)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(manifest.files)


@pytest.mark.parametrize("name", NAMES)
def test_fp8_keeps_every_unquantized_tensor_bit_for_bit(conversions: Path, name: str) -> None:
    base, made = conversions / "base" / name, conversions / "made" / f"{name}-fp8"
    recipe = recipes.of(tensors.read_config(base))
    kept = [one for one, tensor in tensors.read(base).items() if not recipe.quantizes(one, tensor.shape)]

    assert kept
    assert {one: tensor_bytes(made, one) for one in kept} == {one: tensor_bytes(base, one) for one in kept}


def test_awq_keeps_the_layers_that_the_model_class_does_not_load(conversions: Path) -> None:
    base, made = conversions / "base" / "qwen3_5", conversions / "made" / "qwen3_5-awq"
    layers = [name for name in tensors.read(base) if name.startswith("mtp.")]

    assert layers
    assert {one: tensor_bytes(made, one) for one in layers} == {
        one: tensor_bytes(base, one) for one in layers
    }


def test_awq_made_again_is_the_same_byte_for_byte(world: World, conversions: Path) -> None:
    serve(world, conversions / "base" / "qwen2")
    world.start(scheme="awq", group_size=64, calibration_tokens=256)
    world.execute("download", "convert")
    folder = Path(world.facts("convert")["path"])
    manifest = (folder / store.MANIFEST).read_bytes()
    weights = folder / "model.safetensors"
    right = weights.read_bytes()
    weights.unlink()

    result = world.execute("convert")

    assert result.changed
    assert weights.read_bytes() == right
    assert (folder / store.MANIFEST).read_bytes() == manifest
    assert world.staging() == []
    assert not world.execute("convert").changed
    assert_progress_counted_layers(world)


def test_a_killed_conversion_is_made_once_more_for_all_who_want_it(
    world: World, conversions: Path, tmp_path: Path
) -> None:
    serve(world, conversions / "base" / "qwen2")
    counted = CountingEnvironment(tmp_path, world.settings.python_convert)
    world.settings = world.settings_with(python_convert=counted.python)
    world.start("run-1", scheme="fp8")
    world.start("run-2", scheme="fp8")
    world.execute("download")
    with world.executing("convert", "run-1") as process:
        (converter,) = wait_until(lambda: processes.find("run-1/convert"), 60)
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not converter.is_alive())
    assert world.staging() != []
    assert not (world.home / "store/releases").exists()
    began = counted.times()

    with world.executing("convert", "run-1") as one, world.executing("convert", "run-2") as other:
        outputs([one, other], timeout_s=300)

    assert counted.times() == began + 1
    folder = Path(world.facts("convert", "run-1")["path"])
    assert world.facts("convert", "run-2")["path"] == str(folder)
    manifest = store.read_manifest(folder / store.MANIFEST)
    assert manifest is not None
    assert store.wrong_files(folder, manifest, world.settings) == []
    assert world.staging() == []


def test_no_secret_reaches_the_converter(world: World, conversions: Path, tmp_path: Path) -> None:
    dump = tmp_path / "environment.txt"
    python = CountingEnvironment(tmp_path, world.settings.python_convert, f"env > {dump}; exit 1").python
    serve(world, conversions / "base" / "qwen2")
    secret = world.settings_with(python_convert=python, HF_TOKEN="hf_secret")
    world.start(scheme="fp8")
    world.execute("download")

    with pytest.raises(Exception, match="ended with status 1"):
        world.execute("convert", settings=secret)

    told = dump.read_text()
    assert "QWEN_PIPELINE_PART=run-1/convert\n" in told
    assert "CUDA_VISIBLE_DEVICES=\n" in told
    assert "hf_secret" not in told
    assert world.database_url not in told


class CountingEnvironment:
    """The converting environment, with an interpreter that notes each start."""

    def __init__(self, folder: Path, real: Path, instead: str | None = None) -> None:
        self._starts = folder / "starts.txt"
        self.python = folder / "counted/bin/python"
        self.python.parent.mkdir(parents=True)
        (folder / "counted/lib").symlink_to(real.parent.parent / "lib")
        self.python.write_text(f'#!/bin/sh\necho start >> {self._starts}\n{instead or f"exec {real}"} "$@"\n')
        self.python.chmod(0o755)

    def times(self) -> int:
        return len(self._starts.read_text().splitlines()) if self._starts.exists() else 0


def serve(world: World, checkpoint: Path) -> None:
    shutil.rmtree(world.repositories / REPO)
    shutil.copytree(checkpoint, world.repositories / REPO)


def assert_progress_counted_layers(world: World) -> None:
    with world.ledger.transaction() as connection:
        row: Any = connection.execute(
            "select done, total, unit from progress where stage = 'convert'"
        ).fetchone()
    assert row["unit"] == "layers"
    assert 0 < row["done"] <= row["total"] == 2


def tensor_bytes(folder: Path, name: str) -> bytes:
    path = folder / tensors.read(folder)[name].file
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + begin)
        return file.read(end - begin)
