"""A release is loaded by the real vLLM before it is published, where this machine's CPU can."""

from pathlib import Path

import pytest

from tasks.errors import StageFailed
from tasks.spec.model import Gate
from tasks.weights import gate, memory, recipes, store, trial
from tests.weights.converted import measurement, serve
from tests.weights.world import World

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900)]


@pytest.mark.everything
def test_a_release_that_vllm_answers_with_says_so_in_its_record(
    world: World,
    conversions: Path,
) -> None:
    serve(world, conversions / "base" / "qwen2")
    world.start(scheme="fp8")
    world.execute("download")

    result = world.execute("convert", settings=world.settings_with(try_releases=True))

    manifest = store.read_manifest(Path(result.facts["path"]) / store.MANIFEST)
    assert manifest is not None
    metrics = manifest.about["metrics"]
    assert metrics["served"].startswith("vllm 0")
    assert metrics["made_by"] == "fp8"
    assert gate.recorded_problems(metrics, gate.limits_of("fp8", Gate())) == []
    assert result.facts["kl"] == metrics["kl"]


@pytest.mark.parametrize(
    ("scheme", "architecture", "says"),
    [
        ("fp8", "Qwen2ForCausalLM", None),
        ("awq", "Qwen3_5ForConditionalGeneration", None),
        ("fp8_block", "Qwen2ForCausalLM", "no kernels"),
        ("awq", "Qwen3MoeForCausalLM", "no kernels"),
        ("fp8", "Qwen3_5MoeForConditionalGeneration", "no kernels"),
    ],
)
def test_what_a_cpu_cannot_serve_is_known_before_it_is_tried(
    world: World, scheme: str, architecture: str, says: str | None
) -> None:
    settings = world.settings_with(try_releases=True)

    why = trial.why_not(scheme, recipes.RECIPES[architecture], base_bytes=1000, settings=settings)

    assert why is None if says is None else says in str(why)


def test_what_does_not_fit_in_memory_is_not_tried(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 10**9)
    recipe = recipes.RECIPES["Qwen2ForCausalLM"]

    why = trial.why_not("fp8", recipe, base_bytes=1000, settings=world.settings_with(try_releases=True))

    assert "1.0 GB are free" in str(why)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"engine": "vllm 1", "losses": [9.0], "answer_tokens": 8}, r"9\.000 nats a token .* where 2\.000"),
        ({"engine": "vllm 1", "losses": [float("nan")], "answer_tokens": 8}, "nan nats"),
        ({"engine": "vllm 1", "losses": [2.0], "answer_tokens": 0}, r"0 token\(s\) answered"),
    ],
)
def test_an_engine_that_reads_the_weights_differently_publishes_nothing(
    found: dict[str, object], says: str
) -> None:
    with pytest.raises(StageFailed, match=rf"reads it differently: .*{says}"):
        trial.judge(found, measurement(losses=[2.0]), sequences=1)
