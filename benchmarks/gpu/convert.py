"""This project's converter at real size: time, memory, and whether the outcome is proven structurally.

`fp8` runs what the stage runs (`tasks.weights.converting` in the converting environment, then `assemble` and
`verify`). `w4` is no scheme of the project: 4-bit weights in AWQ's format rounded without calibration, on the
GPU, because AWQ's search at this size on a CPU does not fit into a session. Its speed is AWQ's, its answers
would not be.
"""

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit import Kit, Stopwatch
from tasks.weights import conversion, recipes, store, tensors, verify
from tasks.weights.converting import Job

_W4 = """
import sys
from llmcompressor import model_free_ptq
source, made, ignored = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
model_free_ptq(
    model_stub=source, save_directory=made, scheme="W4A16_ASYM", ignore=ignored, max_workers=1, device="cuda:0"
)
"""


def convert(kit: Kit, scheme: str) -> dict[str, Any]:
    """Make KIT/models/`scheme` from KIT/models/none."""
    base, release, work = kit.model("none"), kit.model(scheme), kit / f"converting-{scheme}"
    for folder in (release, work):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    recipe = recipes.of(tensors.read_config(base))
    job = Job(
        source=str(base),
        made=str(work / "made"),
        scheme=scheme,
        candidates=[scheme],
        group_size=128,
        symmetric=False,
        ignored=list(recipe.ignored),
        loader=recipe.loader,
        texts=[],
        tokens=0,
        sample_tokens=0,
        memory_bytes=2**36,
        progress=str(work / "progress.json"),
    )
    (work / "job.json").write_text(job.dumps())
    python = str(kit.python("convert"))
    if scheme == "fp8":
        command = [python, "-m", "tasks.weights.converting", str(work / "job.json")]
        devices = {"CUDA_VISIBLE_DEVICES": ""}  # as the stage: it holds no lease on a GPU
    else:
        command = [python, "-c", _W4, job.source, job.made, ",".join(job.ignored)]
        devices = {}
    watch = Stopwatch()
    with (kit / f"logs/convert-{scheme}.log").open("ab") as log:
        subprocess.run(
            command,
            check=True,
            stdout=log,
            stderr=log,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", **devices},
        )
    converted_s = watch.lap_s()
    files = {
        path.name: store.File(path.stat().st_size, "") for path in sorted(base.iterdir()) if path.is_file()
    }
    made = Path(job.made, scheme) if scheme == "fp8" else Path(job.made)
    conversion.assemble(base, store.Manifest({}, files), made, release)
    assembled_s = watch.lap_s()
    verified = _verify(kit, scheme, recipe)
    size, made_size = (sum(one.bytes for one in tensors.read(folder).values()) for folder in (base, release))
    return {
        "scheme": scheme,
        "source_bytes": size,
        "release_bytes": made_size,
        "converter_s": converted_s,
        "read_gb_per_s": round(size / converted_s / 1e9, 3),
        "assemble_s": assembled_s,
        "verify_s": watch.lap_s(),
        "verified": verified,
        # Linux counts in KiB.
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "quantization": json.loads((release / "config.json").read_text())["quantization_config"]["format"],
    }


def _verify(kit: Kit, scheme: str, recipe: recipes.Recipe) -> str:
    try:
        verify.verify(
            kit.model("none"), kit.model(scheme), "fp8" if scheme == "fp8" else "awq", 128, False, recipe
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "as the scheme asks"
