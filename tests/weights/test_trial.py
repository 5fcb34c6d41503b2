"""A release is loaded by the real vLLM before it is published, where this machine's CPU can."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tasks.errors import StageFailed
from tasks.node import processes
from tasks.settings import Settings
from tasks.spec.model import Gate
from tasks.weights import calibration, conversion, gate, memory, recipes, store, trial
from tests.weights.converted import measurement, measurements, serve
from tests.weights.world import World

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900)]

SERVED_ON_A_CPU = [
    *((name, scheme) for name in ("qwen2", "qwen3", "qwen3_5", "qwen3_5_vl") for scheme in ("fp8", "awq")),
    ("qwen2", "awq-symmetric"),
]
"""The dense ones: for experts and for fp8_block vLLM has no kernels there."""


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


@pytest.mark.everything
@pytest.mark.parametrize(("name", "scheme"), SERVED_ON_A_CPU)
def test_vllm_thinks_of_every_release_that_a_cpu_can_serve_what_was_measured(
    conversions: Path, tmp_path: Path, name: str, scheme: str
) -> None:
    base = conversions / "base" / name
    measured = measurements(conversions / "measured" / f"{name}-{scheme}.json")
    chosen = gate.choose(measured, gate.limits_of(scheme.partition("-")[0], Gate()))
    release, report = tmp_path / "release", tmp_path / "report.json"
    release.mkdir()
    made = shutil.copytree(conversions / "made" / f"{name}-{scheme}" / chosen, tmp_path / "made")
    conversion.assemble(base, store.describe(base, {}), made, release)
    job = trial.job_for(release, measured[chosen], calibration.held_out(None, 512), 128, report)
    (tmp_path / "job.json").write_text(job.dumps())

    ended = subprocess.run(
        [Settings().python_serving, "-m", "tasks.weights.trying", tmp_path / "job.json"],
        env=processes.environment("tests/trying", {"HF_HUB_OFFLINE": "1", **trial.environment(tmp_path)}),
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(report.read_text())
    trial.judge(found, measured[chosen], len(job.sequences))
    nats = {"vllm": sum(found["losses"]) / 4, "measured": sum(measured[chosen].losses) / 4}
    print(json.dumps({"model": name, "scheme": scheme, "candidate": chosen, "nats": nats}))


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


def test_gated_delta_nets_are_tried_in_bfloat16_because_vllm_knows_nothing_else_on_a_cpu() -> None:
    assert trial.dtype_on_cpu("Qwen3_5ForCausalLM") == "auto"
    assert trial.dtype_on_cpu("Qwen2ForCausalLM") in ("auto", "float32")


def test_a_model_that_a_cpu_would_read_for_many_minutes_is_not_tried(world: World) -> None:
    recipe = recipes.RECIPES["Qwen2ForCausalLM"]

    why = trial.why_not("fp8", recipe, base_bytes=18 * 10**9, settings=world.settings_with(try_releases=True))

    assert why == "18.0 GB of weights are too many to be tried on a CPU"


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
