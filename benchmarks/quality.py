"""How good fp8, awq and plain rounding are on one model: numbers, and a few answers side by side.

    .venv/bin/python -m benchmarks.quality MODEL_FOLDER WORK_FOLDER [--no-answers]

Converts the model with every scheme and group size that divides it, measures each candidate as the gate does
(1,024 held-out tokens), and lets vLLM answer with each on this machine's CPU. Prints one JSON object a line.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tasks.errors import InputError
from tasks.settings import Settings
from tasks.weights import calibration, conversion, converting, measuring, recipes, store, tensors
from tasks.weights.scales import SCALES

_TOKENS = 512
_HELD_OUT_TOKENS = 1024

_QUESTIONS = (
    "What is the capital of France?",
    "Explain in one sentence what a hash function does.",
    "Write a Python function that adds two numbers.",
)

_CONVERT = """
import json, sys
from pathlib import Path
from tasks.weights import converting, measuring
jobs, job = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for one in jobs:
    converting.convert(converting.Job(**one))
Path(job["report"]).write_text(json.dumps(measuring.measure(measuring.Job(**job))))
"""

_ANSWER = """
import json, sys
import vllm
model, dtype, questions = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
engine = vllm.LLM(model=model, dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=4,
    kv_cache_memory_bytes=2**27, limit_mm_per_prompt={"image": 0, "video": 0})
asked = [[{"role": "user", "content": question}] for question in questions]
answers = engine.chat(asked, vllm.SamplingParams(max_tokens=32, temperature=0.0), use_tqdm=False)
print("answers", json.dumps([answer.outputs[0].text for answer in answers]))
"""


def measure(model: Path, work: Path) -> dict[str, Path]:
    """Convert and measure; prints the numbers, returns the releases by name."""
    recipe = recipes.of(tensors.read_config(model))
    jobs = {"fp8": _job(model, work / "fp8", "fp8", 128, recipe)}
    for group_size in (128, 64):
        try:
            tensors.check_group_size(model, group_size)
        except InputError as error:
            print(json.dumps({"group_size": group_size, "refused": str(error)}))
            continue
        name = f"g{group_size}"
        jobs[name] = _job(model, work / name, "awq", group_size, recipe)
    made = {
        candidate if name == "fp8" else f"{candidate}-{name}": Path(job.made, candidate)
        for name, job in jobs.items()
        for candidate in job.candidates
    }
    measured = measuring.Job(
        base=str(model),
        candidates={name: str(folder) for name, folder in made.items()},
        scales={name: str(folder / SCALES) for name, folder in made.items() if name.startswith("awq")},
        texts=calibration.held_out(None, _HELD_OUT_TOKENS),
        tokens=_HELD_OUT_TOKENS,
        sample_tokens=calibration.HELD_OUT_SAMPLE_TOKENS,
        report=str(work / "measured.json"),
    )
    _run(
        Settings().python_convert,
        _CONVERT,
        json.dumps([json.loads(job.dumps()) for job in jobs.values()]),
        measured.dumps(),
    )
    for name, found in json.loads(Path(measured.report).read_text()).items():
        print(json.dumps({"candidate": name, **_short(found)}), flush=True)
    return {"base": model} | {
        name: _release(model, folder, work / f"release-{name}") for name, folder in made.items()
    }


def answer(releases: dict[str, Path], dtype: str) -> None:
    """Let vLLM answer with each; prints the answers."""
    for name, release in releases.items():
        said = _run(Settings().python_serving, _ANSWER, str(release), dtype, json.dumps(_QUESTIONS))
        (line,) = (line for line in said.splitlines() if line.startswith("answers "))
        print(
            json.dumps({"candidate": name, "answers": json.loads(line.removeprefix("answers "))}), flush=True
        )


def _job(model: Path, made: Path, scheme: str, group_size: int, recipe: recipes.Recipe) -> converting.Job:
    return converting.Job(
        source=str(model),
        made=str(made),
        scheme=scheme,
        candidates=[converting.ROUNDED, "awq"] if scheme == "awq" else [scheme],
        group_size=group_size,
        symmetric=False,
        ignored=list(recipe.ignored),
        loader=recipe.loader,
        texts=calibration.texts(None, _TOKENS) if scheme == "awq" else [],
        tokens=_TOKENS,
        sample_tokens=calibration.SAMPLE_TOKENS,
        memory_bytes=2**50,
        progress=str(made.parent / "progress.json"),
    )


def _short(found: dict[str, Any]) -> dict[str, Any]:
    worst = max(found["weight_errors"], key=found["weight_errors"].get)
    numbers = ("perplexity", "base_perplexity", "kl", "top1_agreement")
    return {name: round(found[name], 5) for name in numbers} | {
        "worst_layer": worst,
        "worst_error": round(found["weight_errors"][worst], 4),
    }


def _release(model: Path, made: Path, release: Path) -> Path:
    release.mkdir()
    copy = release.parent / f"{release.name}-made"
    shutil.copytree(made, copy)
    conversion.assemble(model, store.describe(model, {}), copy, release)
    return release


def _run(python: Path, code: str, *arguments: str) -> str:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [str(python), "-c", code, *arguments]
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(ended.stderr[-3000:])
    return ended.stdout


def main() -> None:
    """See the text above."""
    model, work = Path(sys.argv[1]), Path(sys.argv[2])
    work.mkdir(parents=True)
    releases = measure(model, work)
    if "--no-answers" not in sys.argv:
        flags = set(Path("/proc/cpuinfo").read_text().split())
        answer(releases, "auto" if flags & {"avx512_bf16", "amx_bf16"} else "float32")


if __name__ == "__main__":
    main()
