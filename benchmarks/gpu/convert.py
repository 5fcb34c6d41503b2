"""This project's converter at real size: time, memory, and whether the outcome is proven structurally.

`fp8` and `awq` run what the stage runs (`tasks.weights.converting` in the converting environment, then
`assemble` and `verify`), `awq` with a GPU in sight: its search for scales takes a CPU far longer than a session
has. `awq-cpu` is the same without one, for as long as it is given, and says how far it came. `w4` is no scheme
of the project: 4-bit weights in AWQ's format rounded without calibration.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit import Kit, Stopwatch
from benchmarks.gpu.sampling import Peak
from tasks.weights import calibration, conversion, recipes, store, tensors, verify
from tasks.weights.converting import Job

_TOKENS = 4096
"""That awq looks at: the spec's default."""

_W4 = """
import sys
from llmcompressor import model_free_ptq
source, made, ignored = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
model_free_ptq(
    model_stub=source, save_directory=made, scheme="W4A16_ASYM", ignore=ignored, max_workers=1, device="cuda:0"
)
"""


def convert(kit: Kit, scheme: str, limit_s: float | None = None) -> dict[str, Any]:
    """Make KIT/models/`scheme` from KIT/models/none.

    Args:
        limit_s: when the converter is ended; then nothing is made.
    """
    base, release, work = kit.model("none"), kit.model(scheme), kit / f"converting-{scheme}"
    for folder in (release, work):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    recipe = recipes.of(tensors.read_config(base))
    kind = scheme.partition("-")[0]
    job = Job(
        source=str(base),
        made=str(work / "made"),
        scheme=kind,
        candidates=[kind],
        group_size=128,
        symmetric=False,
        ignored=list(recipe.ignored),
        loader=recipe.loader,
        texts=calibration.texts(None, _TOKENS) if kind == "awq" else [],
        tokens=_TOKENS if kind == "awq" else 0,
        sample_tokens=calibration.SAMPLE_TOKENS if kind == "awq" else 0,
        memory_bytes=2**36,
        progress=str(work / "progress.json"),
    )
    watch = Stopwatch()
    with Peak() as peak:
        ended, layers = _run(kit, scheme, job, limit_s)
    converted_s = watch.lap_s()
    source_bytes = sum(one.bytes for one in tensors.read(base).values())
    found = {
        "scheme": scheme,
        "on": "CPU" if scheme in _ON_CPU else "GPU",
        "source_bytes": source_bytes,
        "converter_s": converted_s,
        "read_gb_per_s": round(source_bytes / converted_s / 1e9, 3),
        "layers": layers,
        # Linux counts in KiB.
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        **peak.found(),
    }
    if not ended:
        return {**found, "ended_after_s": limit_s}
    files = {
        path.name: store.File(path.stat().st_size, "") for path in sorted(base.iterdir()) if path.is_file()
    }
    made = Path(job.made) if scheme == "w4" else Path(job.made, kind)
    conversion.assemble(base, store.Manifest({}, files), made, release)
    return {
        **found,
        "assemble_s": watch.lap_s(),
        "release_bytes": sum(one.bytes for one in tensors.read(release).values()),
        "verified": _verify(kit, scheme, recipe),
        "verify_s": watch.lap_s(),
        "quantization": json.loads((release / "config.json").read_text())["quantization_config"]["format"],
    }


_ON_CPU = ("fp8", "awq-cpu")


def _run(kit: Kit, scheme: str, job: Job, limit_s: float | None) -> tuple[bool, list[list[float]]]:
    """Whether the converter came to its end, and after how many seconds it was done with how many layers."""
    job_file = Path(job.progress).with_name("job.json")
    job_file.write_text(job.dumps())
    python = str(kit.python("convert"))
    command = [python, "-m", "tasks.weights.converting", str(job_file)]
    if scheme == "w4":
        command = [python, "-c", _W4, job.source, job.made, ",".join(job.ignored)]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if scheme in _ON_CPU else {}  # as the stage: it holds no lease
    watch = Stopwatch()
    layers: list[list[float]] = []
    with (kit / f"logs/convert-{scheme}.log").open("ab") as log:
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", **hidden},
        )
        while child.poll() is None:
            if limit_s is not None and watch.total_s() > limit_s:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return False, layers
            done = _done(Path(job.progress))
            if done and (not layers or layers[-1][1] != done):
                layers.append([watch.total_s(), done])
            time.sleep(0.25)
    if child.returncode:
        raise SystemExit(f"the converter ended with status {child.returncode}: logs/convert-{scheme}.log")
    return True, layers


def _done(progress: Path) -> int:
    try:
        return int(json.loads(progress.read_text())["done"])
    except (OSError, ValueError, KeyError):
        return 0


def _verify(kit: Kit, scheme: str, recipe: recipes.Recipe) -> str:
    try:
        layout = "fp8" if scheme == "fp8" else "awq"
        verify.verify(kit.model("none"), kit.model(scheme), layout, 128, False, recipe)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "as the scheme asks"
