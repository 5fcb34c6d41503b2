"""A child process of the stage in another environment: the job it is given, its progress, why it failed."""

import json
import logging
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.contract import Context
from tasks.errors import InputError, StageError, StageFailed, Unavailable
from tasks.node import processes

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_LAST_LINES = 6

_FULL_BYTES = 2**20
"""Less free than this, and a child's own last words may not have reached the log."""


def run(
    python: Path,
    module: str,
    job: str,
    work: Path,
    context: Context,
    *,
    says: str,
    progress: Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> None:
    """Run `PYTHON -m MODULE JOB_FILE`, tied to this process, and show how far it is.

    Args:
        work: a folder of the stage's own; the job is written there, and it is the child's current folder.
        says: what the child is, for messages: "the converter".
        progress: the file in which it says how far it is.

    Raises:
        InputError: it found a part of the spec wanting.
        Unavailable: it was killed.
        StageFailed: it failed. Both quote the end of its log.
    """
    name = module.rpartition(".")[2]
    job_file = work / f"{name}.json"
    job_file.write_text(job)
    log_file = context.settings.logs / context.run.run_id / "convert.log"
    log_begins = log_file.stat().st_size if log_file.exists() else 0
    child = processes.spawn(
        [python, "-m", module, job_file],
        processes.environment(context.part, {**_environment(work), **(extra or {})}),
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
                found = _read_progress(progress) if progress else {}
                if found and found != shown:
                    context.claim.progress(found["done"], found["total"], found["unit"])
                    shown = found
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    log.info("%s ran %.0f s", says, time.monotonic() - began)
    if status != 0:
        _refuse(says, status, log_file, log_begins)


def _environment(work: Path) -> dict[str, str]:
    return {
        "CUDA_VISIBLE_DEVICES": "",  # the stage holds no lease on a GPU
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "huggingface"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait spinning starve the other stages of a small machine
    }


def _refuse(says: str, status: int, log_file: Path, log_begins: int) -> None:
    with log_file.open("rb") as file:
        file.seek(log_begins)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    if status == 1 and lines and lines[-1].startswith("convert."):
        raise InputError(lines[-1])
    was_killed = status == -signal.SIGKILL
    why = (
        "was killed, as the kernel does when memory runs out" if was_killed else f"ended with status {status}"
    )
    # Memory that others took may be free at the next try; what was killed for want of disk is not helped by one.
    error: type[StageError] = Unavailable if was_killed else StageFailed
    if shutil.disk_usage(log_file.parent).free < _FULL_BYTES:
        why += " on a full disk: make room (`qwen-pipeline releases` lists old ones) and execute it again"
        error = StageFailed
    raise error(f"{says} {why}; {log_file} ends with: {' | '.join(lines[-_LAST_LINES:])}")


def _read_progress(path: Path) -> Mapping[str, Any]:
    try:
        progress = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return progress if isinstance(progress, dict) else {}
