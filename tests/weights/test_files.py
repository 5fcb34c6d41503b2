"""What a checkpoint's files say: safetensors headers, calibration texts, manifests."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.errors import InputError, StageFailed
from tasks.weights import calibration, check_group_size, recipes, tensors
from tasks.weights.store import read_manifest
from tasks.weights.verify import verify
from tests.weights.world import write_safetensors

Q = "model.layers.0.self_attn.q_proj"


def checkpoint(folder: Path, tensors_in_it: dict[str, tuple[str, tuple[int, ...]]], **config: object) -> Path:
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors_in_it)
    document = {"architectures": ["Qwen2ForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


BASE: dict[str, tuple[str, tuple[int, ...]]] = {
    f"{Q}.weight": ("BF16", (64, 256)),
    "model.embed_tokens.weight": ("BF16", (32, 256)),
}
FP8 = BASE | {f"{Q}.weight": ("F8_E4M3", (64, 256)), f"{Q}.weight_scale": ("BF16", (64, 1))}
AWQ = {
    f"{Q}.weight_packed": ("I32", (64, 32)),
    f"{Q}.weight_scale": ("BF16", (64, 4)),
    f"{Q}.weight_zero_point": ("I32", (8, 4)),
    f"{Q}.weight_shape": ("I64", (2,)),
    "model.embed_tokens.weight": ("BF16", (32, 256)),
}


def quantization(name: str) -> dict[str, object]:
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": name}}


@pytest.mark.parametrize("size", [0, 4, 8, 100])
def test_a_truncated_file_is_no_safetensors(tmp_path: Path, size: int) -> None:
    path = checkpoint(tmp_path / "c", BASE) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(StageFailed, match="not a safetensors file"):
        tensors.read(path.parent)


def test_a_file_whose_data_is_cut_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", BASE) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(StageFailed, match="bytes long and its header speaks of"):
        tensors.read(path.parent)


def test_the_group_size_is_checked_against_what_is_quantized_only(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c", BASE | {"lm_head.weight": ("BF16", (32, 100))})

    check_group_size(folder, 128)


def test_a_layer_that_no_group_size_divides_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c", {f"{Q}.weight": ("BF16", (64, 100))})

    with pytest.raises(
        InputError, match=rf"100 inputs of {Q} .*no group size works, take convert.scheme fp8"
    ):
        check_group_size(folder, 64)


@pytest.mark.parametrize(
    "module",
    [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.linear_attn.in_proj_a",
        "model.visual.blocks.0.attn.qkv",
        "mtp.fc",
    ],
)
def test_the_table_keeps_what_must_stay_precise(module: str) -> None:
    recipe = recipes.RECIPES["Qwen3_5ForConditionalGeneration"]

    assert not recipe.matrices(f"{module}.weight", (64, 64))
    assert recipe.matrices("model.language_model.layers.0.linear_attn.in_proj_qkv.weight", (64, 64))


@pytest.mark.parametrize(
    ("scheme", "made", "name"), [("fp8", FP8, "float-quantized"), ("awq", AWQ, "pack-quantized")]
)
def test_a_release_with_the_right_structure_passes(
    tmp_path: Path, scheme: str, made: dict, name: str
) -> None:  # type: ignore[type-arg]
    base = checkpoint(tmp_path / "base", BASE)
    release = checkpoint(tmp_path / "release", made, **quantization(name))

    verify(base, release, scheme, 64, False, recipes.RECIPES["Qwen2ForCausalLM"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({f"{Q}.weight_packed": None}, r"lacks .*q_proj\.weight_packed"),
        ({f"{Q}.weight_scale": ("BF16", (64, 2))}, r"q_proj\.weight_scale .*\[64, 2\] and should be"),
        ({"model.embed_tokens.weight": ("F32", (32, 256))}, "embed_tokens.weight .* F32 .* should be BF16"),
        ({f"{Q}.weight": ("BF16", (64, 256))}, r"holds .*q_proj\.weight, which nothing asked for"),
    ],
)
def test_a_release_with_a_wrong_tensor_is_refused_by_name(tmp_path: Path, change: dict, says: str) -> None:  # type: ignore[type-arg]
    base = checkpoint(tmp_path / "base", BASE)
    made = {name: tensor for name, tensor in {**AWQ, **change}.items() if tensor is not None}
    release = checkpoint(tmp_path / "release", made, **quantization("pack-quantized"))

    with pytest.raises(StageFailed, match=says):
        verify(base, release, "awq", 64, False, recipes.RECIPES["Qwen2ForCausalLM"])


def test_a_release_without_quantization_config_is_refused(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", BASE)
    release = checkpoint(tmp_path / "release", AWQ)

    with pytest.raises(StageFailed, match="no quantization_config"):
        verify(base, release, "awq", 64, False, recipes.RECIPES["Qwen2ForCausalLM"])


def test_calibration_texts_come_from_jsonl_parquet_and_text_alike(tmp_path: Path) -> None:
    texts = ["one", "zwei", "三"]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), tmp_path / "c.parquet")
    (tmp_path / "c.txt").write_text("\n\n".join(texts))

    for name in ("c.jsonl", "c.parquet", "c.txt"):
        assert calibration.texts(str(tmp_path / name), 256) == texts


def test_calibration_keeps_no_more_text_than_it_needs() -> None:
    few, many = calibration.texts(None, 256), calibration.texts(None, 4096)

    assert many[: len(few)] == few
    assert len(few) < len(many)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("absent.jsonl", None, "cannot be read: No such file"),
        ("c.csv", "a,b", "give .jsonl, .parquet or .txt"),
        ("c.jsonl", '{"text": "a"}\n{"txt": "b"}', 'line 2 .* "text"'),
        ("c.jsonl", "", "holds no text"),
        ("c.parquet", "not parquet", "is not parquet"),
    ],
)
def test_a_calibration_file_that_cannot_serve_is_bad_input(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)

    with pytest.raises(InputError, match=rf"convert\.calibration: .*{says}"):
        calibration.texts(str(path), 256)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "files": {}}',
        '{"version": 1, "files": {"../x": {"size": 1, "sha256": ""}}}',
    ],
)
def test_a_text_that_is_no_manifest_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)

    assert read_manifest(tmp_path / "manifest.json") is None
