"""What the spec leaves open comes from what was measured, and from nothing that was not."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks import tuning
from tasks.settings import REPOSITORY
from tasks.spec import Serving

H200 = "NVIDIA H200"
NINE_B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {"hidden_size": 4096, "num_hidden_layers": 32},
}
FP8 = {"quantization_config": {"format": "float-quantized", "config_groups": {}}}
RESULTS = REPOSITORY / "benchmarks/results"


def sequences(config: dict[str, Any], gpu: str = H200, scheme: str | None = None, **serving: Any) -> int:
    return tuning.settled(Serving(**serving), tuning.find(gpu, config, scheme)).sequences


def test_what_was_measured_for_this_gpu_model_and_scheme_is_the_default() -> None:
    assert sequences({**NINE_B, **FP8}) == 512
    assert sequences(NINE_B) == 512
    assert sequences(NINE_B, scheme="awq") == 256


def test_what_the_spec_says_is_never_overruled() -> None:
    assert sequences({**NINE_B, **FP8}, max_num_seqs=7) == 7


@pytest.mark.parametrize(
    ("config", "gpu"),
    [
        ({**NINE_B, **FP8}, "NVIDIA H200 MIG 3g.71gb"),
        ({**NINE_B, **FP8}, "NVIDIA H100 80GB HBM3"),
        ({**NINE_B, **FP8}, "NVIDIA H200 (simulated)"),
        ({**NINE_B, **FP8}, ""),
        ({**NINE_B, "text_config": {"hidden_size": 4096, "num_hidden_layers": 40}}, H200),
        ({**NINE_B, "architectures": ["Qwen2ForCausalLM"]}, H200),
        ({}, H200),
    ],
)
def test_what_was_not_measured_keeps_the_general_default(config: dict[str, Any], gpu: str) -> None:
    assert sequences(config, gpu) == 256


@pytest.mark.parametrize("serving", [{"kv_cache_memory_mb": 4096}, {"gpu_memory_utilization": 0.5}])
def test_a_worker_with_less_memory_than_was_measured_keeps_the_general_default(serving: Any) -> None:
    assert sequences({**NINE_B, **FP8}, **serving) == 256


@pytest.mark.parametrize(
    ("quantization", "scheme"),
    [
        (None, "none"),
        ({"format": "pack-quantized"}, "awq"),
        ({"quant_method": "awq"}, "awq"),
        (
            {"format": "float-quantized", "config_groups": {"a": {"weights": {"strategy": "channel"}}}},
            "fp8",
        ),
        (
            {"format": "float-quantized", "config_groups": {"a": {"weights": {"strategy": "block"}}}},
            "fp8_block",
        ),
    ],
)
def test_a_release_says_itself_how_it_is_quantized(quantization: Any, scheme: str) -> None:
    assert tuning.scheme_of({**NINE_B, "quantization_config": quantization}) == scheme


def test_a_line_says_whether_the_installed_vllm_is_the_one_it_was_measured_with() -> None:
    line = tuning.find(H200, NINE_B, "fp8")
    assert line is not None
    assert "expected, not measured, of 0.32.0" in line.describe("0.32.0")
    assert "expected" not in line.describe("0.26.0")


def test_a_folder_without_a_readable_config_matches_nothing(tmp_path: Path) -> None:
    assert tuning.config_of(tmp_path) == {}
    (tmp_path / "config.json").write_text("[]")
    assert tuning.config_of(tmp_path) == {}


def steady(run: str) -> float:
    return float(json.loads((RESULTS / f"{run}.json").read_text())["steady"]["generated_tokens_per_s"])


def test_the_gains_that_the_table_tells_are_those_of_the_runs() -> None:
    few = steady("2026-11-30-h200/dispatch-fp8-256-512")
    gains = [
        steady(f"2026-11-30-h200-{number}/dispatch-fp8-256-512") / few - 1 for number in (2, 3)
    ]  # two machines
    assert [round(100 * gain) for gain in sorted(gains)] == [11, 14]
    bfloat16 = [steady(f"2026-11-30-h200/offline-{name}-256-512") for name in ("bf16", "s512")]
    assert round(100 * (bfloat16[1] / bfloat16[0] - 1)) == 5
    awq = steady("2026-11-30-h200-3/dispatch-awq-256-512")
    assert round(100 * (few / awq - 1)) == 9
    assert round(100 * (steady("2026-11-30-h200-3/dispatch-fp8-256-512") / awq - 1)) == 21
