"""The real converter on tiny checkpoints of every architecture; its stage killed, shared, repeated."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import StageFailed
from tasks.node import processes
from tasks.spec.model import Gate
from tasks.weights import conversion, gate, recipes, store, tensors
from tasks.weights.verify import verify, verify_carried_over
from tests.runs import outputs, wait_until
from tests.weights.converted import (
    AWQ,
    CANDIDATES,
    CONVERTED,
    NAMES,
    ON_DISK,
    measurement,
    measurements,
    run_in_converting_environment,
    serve,
)
from tests.weights.world import World

LAYER, NEIGHBOUR = "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.q_proj"
CARRIED_OVER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}

HEADS = {"embed_tokens"}
DELTA_NET = {"conv1d", "in_proj_a", "in_proj_b"}
ROUTER = {"mlp.gate"}
SHARED = {"shared_expert_gate"}
KEPT = {
    "qwen2": HEADS,
    "qwen3": HEADS | {"lm_head"},
    "qwen3_moe": HEADS | ROUTER | {"lm_head"},
    "qwen3_5": HEADS | DELTA_NET | {"mtp"},
    "qwen3_5_vl": HEADS | DELTA_NET | {"lm_head", "visual"},
    "qwen3_5_moe": HEADS | DELTA_NET | ROUTER | SHARED | {"lm_head"},
    "qwen3_5_moe_vl": HEADS | DELTA_NET | ROUTER | SHARED | {"lm_head", "visual", "mtp"},
}
ALL_KEPT = sorted(set.union(*KEPT.values()), key=lambda known: (known not in ("visual", "mtp"), known))


@pytest.mark.parametrize(("name", "scheme"), CONVERTED)
def test_every_architecture_converts_with_every_scheme(
    conversions: Path, tmp_path: Path, name: str, scheme: str
) -> None:
    base = conversions / "base" / name
    base_manifest = store.describe(base, {})
    recipe = recipes.of(tensors.read_config(base))
    for candidate in CANDIDATES[scheme]:
        made = shutil.copytree(
            conversions / "made" / f"{name}-{scheme}" / candidate, tmp_path / candidate / "made"
        )
        release = tmp_path / candidate / "release"
        release.mkdir()

        conversion.assemble(base, base_manifest, made, release)

        verify(base, release, scheme.partition("-")[0], 64, scheme.endswith("symmetric"), recipe)
        manifest = store.describe(release, {})
        verify_carried_over(base_manifest, manifest)
        assert set(manifest.files) >= CARRIED_OVER


@pytest.mark.parametrize(("name", "scheme"), CONVERTED)
def test_what_was_converted_passes_the_gate_by_the_schemes_own_limits(
    conversions: Path, name: str, scheme: str
) -> None:
    limits = gate.limits_of(scheme.partition("-")[0], Gate())
    for candidate, measured in measurements(conversions / "measured" / f"{name}-{scheme}.json").items():
        print(json.dumps({"model": name, "scheme": scheme, "candidate": candidate, **measured.record()}))
        assert measured.problems(limits) == [], candidate
        assert len(measured.weight_errors) == len(quantized_layers(conversions / "base" / name))


@pytest.mark.parametrize(("name", "kept"), KEPT.items())
def test_what_must_stay_unquantized_does(conversions: Path, name: str, kept: set[str]) -> None:
    """By architecture: heads, routers, gates, conv1d, vision tower, small projections, MTP layer."""
    base = conversions / "base" / name
    recipe = recipes.of(tensors.read_config(base))
    stay = {
        re.sub(r"\.\d+", "", one.removesuffix(".weight"))
        for one, tensor in tensors.read(base).items()
        if len(tensor.shape) > 1 and not recipe.matrices(one, tensor.shape)
    }
    seen = {next((known for known in ALL_KEPT if known in one), one) for one in stay}
    assert seen == kept


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block"])
def test_fp8_keeps_every_unquantized_tensor_bit_for_bit(conversions: Path, name: str, scheme: str) -> None:
    base, made = conversions / "base" / name, conversions / "made" / f"{name}-{scheme}" / scheme
    recipe = recipes.of(tensors.read_config(base))
    kept = [one for one, tensor in tensors.read(base).items() if not recipe.matrices(one, tensor.shape)]

    assert kept
    assert {one: tensor_bytes(made, one) for one in kept} == {one: tensor_bytes(base, one) for one in kept}


@pytest.mark.parametrize("name", [name for name in AWQ if "moe" in name])
def test_awq_makes_the_router_up_for_a_norm_that_it_scaled(conversions: Path, name: str) -> None:
    awq = measurements(conversions / "measured" / f"{name}-awq.json")["awq"]
    routers = [one for one in awq.scaled if one.endswith("mlp.gate.weight")]

    assert len(routers) == 2
    assert max(awq.kept_errors[one] for one in routers) < 0.01


@pytest.mark.parametrize("candidate", ["fp8", "awq"])
@pytest.mark.parametrize("damage", ["a scale halved", "rows flipped", "swapped with its neighbour"])
def test_a_damaged_layer_is_refused_by_its_name(
    damaged: dict[str, Path], candidate: str, damage: str
) -> None:
    measured = measurements(damaged[candidate])
    limits = gate.limits_of(candidate, Gate())

    assert measured["sound"].problems(limits) == []
    with pytest.raises(StageFailed, match=rf"nothing was published.*{re.escape(LAYER)} \(\d"):
        gate.choose({candidate: measured[damage]}, limits)
    assert measured[damage].worst_layers[0][0] in (LAYER, NEIGHBOUR)


def test_a_changed_tokenizer_is_refused_by_its_name(conversions: Path, tmp_path: Path) -> None:
    base = conversions / "base" / "qwen2"
    base_manifest = store.describe(base, {})
    release = tmp_path / "release"
    release.mkdir()
    made = shutil.copytree(conversions / "made" / "qwen2-fp8" / "fp8", tmp_path / "made")
    conversion.assemble(base, base_manifest, made, release)
    path = release / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_enb|>"))

    with pytest.raises(StageFailed, match=r"tokenizer\.json of the release is not the repository's"):
        verify_carried_over(base_manifest, store.describe(release, {}))


@pytest.fixture(scope="session")
def damaged(conversions: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What was measured of damaged copies, by candidate."""
    found = {}
    for candidate in ("fp8", "awq"):
        work = tmp_path_factory.mktemp("damaged")
        made = conversions / "made" / f"qwen2-{candidate}" / candidate
        run_in_converting_environment("damage.py", conversions / "base" / "qwen2", made, work)
        found[candidate] = work / "measured.json"
    return found


def test_the_better_of_awq_and_plain_rounding_is_published() -> None:
    limits = gate.limits_of("awq", Gate())
    better, worse = (measurement(kl=kl) for kl in (0.01, 0.02))

    assert gate.choose({"awq": better, "rtn": worse}, limits) == "awq"
    assert gate.choose({"awq": worse, "rtn": better}, limits) == "rtn"
    assert gate.choose({"awq": measurement(kl=0.001, perplexity=99.0), "rtn": better}, limits) == "rtn"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kl": 0.7}, r"KL divergence is 0\.7 nats a token, over 0\.6"),
        ({"kl": float("nan")}, "KL divergence is nan"),
        ({"perplexity": 16.0}, r"perplexity is 16 where the base's is 10, over 1\.5 times"),
        (
            {"kept_errors": {"model.norm.weight": 0.0}},
            r"should be as they were and are not: model\.norm\.weight",
        ),
        ({"kept_errors": {"n.weight": 0.5}, "scaled": ["n.weight"]}, r"are not: n\.weight"),
    ],
)
def test_each_limit_refuses_alone_and_says_its_numbers(change: dict[str, Any], says: str) -> None:
    with pytest.raises(StageFailed, match=says):
        gate.choose({"awq": measurement(**change)}, gate.limits_of("awq", Gate()))


def test_a_spec_may_be_stricter_or_laxer_than_the_scheme() -> None:
    strict, lax = (gate.limits_of("awq", Gate(max_kl=kl)) for kl in (0.001, 3.0))

    assert measurement(kl=0.01).problems(strict)
    assert not measurement(kl=2.0).problems(lax)
    assert gate.recorded_problems(measurement(kl=0.01).record(), strict)
    assert not gate.recorded_problems(measurement(kl=0.01).record(), lax)


def test_awq_keeps_the_layers_that_the_model_class_does_not_load(conversions: Path) -> None:
    base, made = conversions / "base" / "qwen3_5_moe_vl", conversions / "made" / "qwen3_5_moe_vl-awq" / "awq"
    layers = [name for name in tensors.read(base) if name.startswith("mtp.")]

    assert layers
    assert {one: tensor_bytes(made, one) for one in layers} == {
        one: tensor_bytes(base, one) for one in layers
    }


@pytest.mark.parametrize("name", ON_DISK)
def test_awq_with_most_of_the_model_on_the_disk_is_the_same_byte_for_byte(
    conversions: Path, name: str
) -> None:
    in_memory, on_disk = (conversions / "made" / f"{name}-{way}" / "awq" for way in ("awq", "awq-on-disk"))

    assert list((on_disk.parents[1] / "offload").iterdir()), "the model was in memory all the same"
    made = sorted(path.name for path in in_memory.iterdir())
    assert sorted(path.name for path in on_disk.iterdir()) == made
    assert [one for one in made if (on_disk / one).read_bytes() != (in_memory / one).read_bytes()] == []


@pytest.mark.everything
def test_awq_made_again_is_the_same_byte_for_byte(world: World, conversions: Path) -> None:
    serve(world, conversions / "base" / "qwen2")
    world.start(scheme="awq", group_size=64, calibration_tokens=256, n_grid=4)
    world.execute("download", "convert")
    folder = Path(world.facts("convert")["path"])
    manifest = (folder / store.MANIFEST).read_bytes()
    weights = sorted(folder.glob("*.safetensors"))[0]
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

    assert counted.times() == began + 2  # once to convert, once to measure
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


def quantized_layers(base: Path) -> list[str]:
    recipe = recipes.of(tensors.read_config(base))
    return [one for name, t in tensors.read(base).items() for one in recipe.matrices(name, t.shape)]


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
