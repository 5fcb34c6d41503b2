"""Tiny models of every architecture in every scheme, each loaded by vLLM on the GPU: most formats have no kernels
on a CPU.

They are made as tests/weights makes them, with sizes that a block of 128 divides, and asked about held-out text:
the engine must think of it what measuring found.
"""

import json
import math
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import ENVIRONMENT
from benchmarks.gpu.kit import Kit, Stopwatch
from tasks.spec.model import Gate
from tasks.weights import calibration, conversion, gate, store, trial
from tasks.weights.trying import Job

_MODELS = ("qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_vl", "qwen3_5_moe", "qwen3_5_moe_vl")
_SCHEMES = ("fp8", "fp8_block", "awq")
_MAKERS, _ENGINES = 4, 5
"""Processes at once; a conversion takes one core or two, an engine some 2 GB of the card."""

_TOKENS, _SAMPLE_TOKENS = 512, 128
"""As tests/weights measures."""


@dataclass(frozen=True)
class _Trial:
    model: str
    scheme: str
    candidate: str
    measured_nats: float
    job: Job


def releases(kit: Kit) -> dict[str, Any]:
    """Make them all, try them all; one line each."""
    folder = kit / "tiny-releases"
    shutil.rmtree(folder, ignore_errors=True)
    watch = Stopwatch()
    with ThreadPoolExecutor(_MAKERS) as makers:
        list(makers.map(lambda model: _convert(kit, folder / model, model), _MODELS))
    made_s = watch.lap_s()
    trials = [trial for model in _MODELS for trial in _trials(folder / model, model)]
    with ThreadPoolExecutor(_ENGINES) as engines:
        rows = list(engines.map(lambda one: _try(kit, one), trials))
    return {"made_s": made_s, "tried_s": watch.lap_s(), "rows": rows}


def _convert(kit: Kit, folder: Path, model: str) -> None:
    folder.mkdir(parents=True)
    script = kit / "checkout/tests/weights/convert_all.py"
    wanted = [f"{model}:{scheme}" for scheme in _SCHEMES]
    with (kit / f"logs/releases-{model}-made.log").open("wb") as log:
        subprocess.run(
            [str(kit.python("convert")), str(script), str(folder), "--times", "2", *wanted],
            check=True,
            stdout=log,
            stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "4"},
        )


def _trials(folder: Path, model: str) -> list[_Trial]:
    """The base as it is, and of each scheme the candidate that would be published."""
    base = folder / "base" / model
    found = []
    for scheme in _SCHEMES:
        report = json.loads((folder / "measured" / f"{model}-{scheme}.json").read_text())
        measured = {name: gate.Measured(**one) for name, one in report.items()}
        candidate = gate.choose(measured, gate.limits_of(scheme, Gate()))
        release = folder / "releases" / scheme
        release.mkdir(parents=True)
        conversion.assemble(
            base, store.describe(base, {}), folder / "made" / f"{model}-{scheme}" / candidate, release
        )
        chosen = measured[candidate]
        nats = sum(chosen.losses) / len(chosen.losses)
        found.append(_Trial(model, scheme, candidate, nats, _job(folder, scheme, release, chosen)))
    base_nats = math.log(chosen.base_perplexity)
    return [_Trial(model, "none", "as downloaded", base_nats, _job(folder, "none", base, chosen)), *found]


def _job(folder: Path, scheme: str, release: Path, measured: gate.Measured) -> Job:
    texts = calibration.held_out(None, _TOKENS)
    asked = trial.job_for(release, measured, texts, _SAMPLE_TOKENS, folder / f"said-{scheme}.json")
    return replace(asked, dtype="auto")


def _try(kit: Kit, one: _Trial) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": one.model,
        "scheme": one.scheme,
        "candidate": one.candidate,
        "measured_nats": round(one.measured_nats, 4),
    }
    report, log = Path(one.job.report), kit / f"logs/releases-{one.model}-{one.scheme}.log"
    job = report.with_name(f"job-{one.scheme}.json")
    job.write_text(one.job.dumps())
    with log.open("wb") as output:
        ended = subprocess.run(
            [str(kit.python("serving")), "-m", "benchmarks.gpu.asking", str(job)],
            check=False,
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                **ENVIRONMENT,
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
        )
    if ended.returncode:
        errors = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
        return {**row, "error": (errors or ["no message"])[-1][-400:]}
    found = json.loads(report.read_text())
    return {
        **row,
        "vllm_nats": round(sum(found["losses"]) / len(found["losses"]), 4),
        "answer_tokens": found["answer_tokens"],
        "kernels": _kernels(log),
    }


def _kernels(log: Path) -> list[str]:
    """What the engine says of the kernels that it chose."""
    lines = log.read_text(errors="replace").splitlines()
    said = (line.rpartition("] ")[2] for line in lines if "Using" in line or "Selected" in line)
    return sorted({line.partition(" out of ")[0] for line in said if "ernel" in line or "ackend" in line})
