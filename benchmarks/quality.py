"""How good fp8, awq and plain rounding are on one model: numbers, and a few answers side by side.

    .venv/bin/python -m benchmarks.quality MODEL_FOLDER WORK_FOLDER
        [--parts N] [--calibration TOKENS] [--n-grid N] [--no-answers]

Converts the model with every scheme and group size that divides it, measures each candidate as the gate does on
N parts of the held-out texts (1,024 tokens of each), and lets vLLM answer with each that it serves on this
machine's CPU. Prints one JSON object a line, and at the end the numbers as a table; docs/weights.md has both.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import InputError
from tasks.settings import Settings
from tasks.weights import calibration, conversion, converting, measuring, recipes, store, tensors, trial
from tasks.weights.scales import SCALES

_HELD_OUT_TOKENS = 1024
_ALL_TEXTS_TOKENS = 1_000_000
_GROUP_SIZES = (128, 64)

_QUESTIONS = (
    "What is the capital of France?",
    "Explain in one sentence what a hash function does.",
    "Write a Python function that adds two numbers.",
)

_CONVERT = """
import json, sys
from pathlib import Path
from tasks.weights import converting, measuring
work = json.loads(Path(sys.argv[1]).read_text())
for one in work["convert"]:
    converting.convert(converting.Job(**one))
for one in work["measure"]:
    job = measuring.Job(**one)
    Path(job.report).write_text(json.dumps(measuring.measure(job)))
"""

_ANSWER = """
import gc, json, sys
import vllm
from vllm.distributed import cleanup_dist_env_and_memory
dtype, questions, releases = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
asked = [[{"role": "user", "content": question}] for question in questions]
for name, release in releases.items():
    engine = vllm.LLM(model=release, dtype=dtype, enforce_eager=True, max_model_len=1024, max_num_seqs=4,
        kv_cache_memory_bytes=2**27, limit_mm_per_prompt={"image": 0, "video": 0})
    answers = engine.chat(asked, vllm.SamplingParams(max_tokens=40, temperature=0.0), use_tqdm=False)
    print("answers", json.dumps({"candidate": name, "answers": [answer.outputs[0].text for answer in answers]}))
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
"""


@dataclass(frozen=True)
class Effort:
    """How long awq looks for its scales: see `tasks.spec.model.Convert`."""

    tokens: int
    n_grid: int


def measure(model: Path, work: Path, parts: int, effort: Effort) -> dict[str, Path]:
    """Convert and measure; prints the numbers, returns the releases by name."""
    config = tensors.read_config(model)
    recipe = recipes.of(config)
    jobs = {
        scheme: _job(model, work / scheme, scheme, 128, recipe, effort) for scheme in ("fp8", "fp8_block")
    }
    for group_size in _GROUP_SIZES:
        try:
            tensors.check_group_size(model, group_size)
        except InputError as error:
            print(json.dumps({"group_size": group_size, "refused": str(error)}), flush=True)
            continue
        name = f"g{group_size}"
        jobs[name] = _job(model, work / name, "awq", group_size, recipe, effort)
    made = {
        name if name in job.candidates else f"{candidate}-{name}": Path(job.made, candidate)
        for name, job in jobs.items()
        for candidate in job.candidates
    }
    texts = calibration.held_out(None, _ALL_TEXTS_TOKENS)
    measured = [_measuring(model, work, made, number, texts[number::parts]) for number in range(parts)]
    plan = {
        "convert": [json.loads(job.dumps()) for job in jobs.values()],
        "measure": [json.loads(job.dumps()) for job in measured],
    }
    (work / "plan.json").write_text(json.dumps(plan))
    _run(Settings().python_convert, _CONVERT, str(work / "plan.json"))
    rows = []
    for number, job in enumerate(measured):
        for name, found in json.loads(Path(job.report).read_text()).items():
            rows.append({"candidate": name, "part": number, **_short(found)})
            print(json.dumps(rows[-1]), flush=True)
    print(_table(rows), flush=True)
    return {"base": model} | {
        name: _release(model, folder, work / f"release-{name}")
        for name, folder in made.items()
        if name != "fp8_block"  # vLLM has no kernels for it on a CPU
    }


def _measuring(
    model: Path, work: Path, made: dict[str, Path], number: int, texts: list[str]
) -> measuring.Job:
    return measuring.Job(
        base=str(model),
        candidates={name: str(folder) for name, folder in made.items()},
        scales={name: str(folder / SCALES) for name, folder in made.items() if name.startswith("awq")},
        texts=texts,
        tokens=_HELD_OUT_TOKENS,
        sample_tokens=calibration.HELD_OUT_SAMPLE_TOKENS,
        report=str(work / f"measured-{number}.json"),
    )


def _table(rows: list[dict[str, Any]]) -> str:
    """Markdown: of each candidate and number, the range over the parts."""
    lines = ["| | perplexity | over base | KL | top-1 agreement | worst layer |", "|---|---|---|---|---|---|"]
    bases = [row["base_perplexity"] for row in rows]
    lines.append(f"| base | {_range(bases, 2)} | | | | |")
    for name in dict.fromkeys(row["candidate"] for row in rows):
        own = [row for row in rows if row["candidate"] == name]
        ratios = [row["perplexity"] / row["base_perplexity"] for row in own]
        columns = [_range([row["perplexity"] for row in own], 2), _range(ratios, 3)]
        columns += [_range([row[key] for row in own], 4) for key in ("kl", "top1_agreement", "worst_error")]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _range(values: list[float], digits: int) -> str:
    least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def answer(releases: dict[str, Path], dtype: str) -> None:
    """Let vLLM answer with each, one after the other in one process; prints the answers."""
    paths = json.dumps({name: str(folder) for name, folder in releases.items()})
    said = _run(Settings().python_serving, _ANSWER, dtype, json.dumps(_QUESTIONS), paths)
    for line in said.splitlines():
        if line.startswith("answers "):
            print(line.removeprefix("answers "), flush=True)


def _job(
    model: Path, made: Path, scheme: str, group_size: int, recipe: recipes.Recipe, effort: Effort
) -> converting.Job:
    return converting.Job(
        source=str(model),
        made=str(made),
        scheme=scheme,
        candidates=[converting.ROUNDED, "awq"] if scheme == "awq" else [scheme],
        group_size=group_size,
        symmetric=False,
        ignored=list(recipe.ignored),
        loader=recipe.loader,
        texts=calibration.texts(None, effort.tokens) if scheme == "awq" else [],
        tokens=effort.tokens,
        sample_tokens=calibration.SAMPLE_TOKENS,
        n_grid=effort.n_grid,
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality")
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--parts", type=int, default=2, help="of the held-out texts")
    parser.add_argument("--calibration", type=int, default=4096, help="tokens that awq looks at")
    parser.add_argument("--n-grid", type=int, default=20, help="scales that awq tries")
    parser.add_argument("--no-answers", action="store_true")
    given = parser.parse_args()
    given.work.mkdir(parents=True)
    releases = measure(given.model, given.work, given.parts, Effort(given.calibration, given.n_grid))
    if not given.no_answers:
        answer(releases, trial.dtype_on_cpu(recipes.architecture(tensors.read_config(given.model))))


if __name__ == "__main__":
    main()
