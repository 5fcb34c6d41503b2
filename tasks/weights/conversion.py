"""One conversion: the job, the child process that does it, and the release put together from its output.

The converting libraries are in an environment of their own, so they run in a child, tied to this process.
Only weights and the quantization part of config.json are taken from it; all else is the repository's, byte by
byte.
"""

import json
import logging
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.contract import Context
from tasks.errors import InputError, StageFailed
from tasks.node import processes
from tasks.weights import calibration, recipes, store, tensors
from tasks.weights.converting import Job
from tasks.weights.store import Manifest
from tasks.weights.verify import is_converted

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_LAST_LINES = 6


def job_of(base: Path, recipe: recipes.Recipe, work: Path, context: Context) -> Job:
    """What the converter is to do for this run.

    Raises:
        InputError: the calibration texts are not those that the release is named by.
    """
    convert = context.run.spec.convert
    texts: list[str] = []
    if convert.scheme == "awq":
        texts = calibration.texts(convert.calibration, convert.calibration_tokens)
        if calibration.digest(texts) != context.run.pins["fingerprint"]["calibration"]:
            source = convert.calibration or "what ships with Python"
            raise InputError(
                f"convert.calibration: {source} changed since "
                f"this run started, and its release is named by the old texts: start another run"
            )
    return Job(
        source=str(base),
        made=str(work / "made"),
        scheme=convert.scheme,
        group_size=convert.group_size,
        ignored=list(recipe.ignored),
        loader=recipe.loader,
        texts=texts,
        tokens=convert.calibration_tokens,
        sample_tokens=calibration.SAMPLE_TOKENS,
        progress=str(work / "progress.json"),
    )


def run(job: Job, work: Path, context: Context) -> None:
    """Run the converter as a tied child and show how far it is.

    Args:
        work: an empty folder for what it writes.

    Raises:
        InputError: the converter found the calibration texts wanting.
        StageFailed: it failed; quotes the end of its log.
    """
    job_file = work / "job.json"
    job_file.write_text(job.dumps())
    log_file = context.settings.logs / context.run.run_id / "convert.log"
    log_begins = log_file.stat().st_size if log_file.exists() else 0
    child = processes.spawn(
        [context.settings.python_convert, "-m", "tasks.weights.converting", job_file],
        processes.environment(context.part, _converter_environment(work)),
        log_file,
        cwd=work,
    )
    began = time.monotonic()
    try:
        shown: Mapping[str, Any] = {}
        while True:
            try:
                status = child.wait(_LOOK_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                progress = _read_progress(Path(job.progress))
                if progress and progress != shown:
                    context.claim.progress(progress["done"], progress["total"], progress["unit"])
                    shown = progress
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    log.info("the converter ran %.0f s", time.monotonic() - began)
    if status != 0:
        _refuse(status, log_file, log_begins)


def assemble(base: Path, base_manifest: Manifest, made: Path, release: Path) -> None:
    """The converter's weights, the repository's other files, its config.json with the quantization added."""
    for path in sorted(made.iterdir()):
        if path.suffix == ".safetensors" or path.name == "model.safetensors.index.json":
            path.rename(release / path.name)
    for name in base_manifest.files:
        if not is_converted(name):
            carry_over(name, base, release)
    quantization = tensors.read_config(made).get("quantization_config")
    document = {**tensors.read_config(base), "quantization_config": quantization}
    (release / "config.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def carry_over(name: str, base: Path, release: Path) -> None:
    """Weights share their bytes with the download. Small files are copied: editing one spares the other."""
    target = release / name
    if name.endswith(".safetensors"):
        store.put(base / name, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / name, target)


def _converter_environment(work: Path) -> dict[str, str]:
    return {
        "CUDA_VISIBLE_DEVICES": "",  # the stage holds no lease on a GPU
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "huggingface"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait spinning starve the other stages of a small machine
    }


def _refuse(status: int, log_file: Path, log_begins: int) -> None:
    with log_file.open("rb") as file:
        file.seek(log_begins)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    if status == 1 and lines and lines[-1].startswith("convert."):
        raise InputError(lines[-1])
    why = (
        "was killed, as the kernel does when memory runs out"
        if status == -9
        else f"ended with status {status}"
    )
    raise StageFailed(f"the converter {why}; {log_file} ends with: {' | '.join(lines[-_LAST_LINES:])}")


def _read_progress(path: Path) -> Mapping[str, Any]:
    try:
        progress = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return progress if isinstance(progress, dict) else {}
