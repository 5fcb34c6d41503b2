"""Convert a checkpoint. Runs in the converting environment, as a child process of the stage:

    PYTHON -m tasks.weights.converting JOB.json

Keeps: nothing is fetched, nothing but the job's folder is written, no tokenizer is saved. What needs no data
(fp8, and the plain rounding that awq is measured against) streams file by file and never builds the model.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

log = logging.getLogger("converting")

ROUNDED = "rtn"
"""The candidate that is rounded to nearest; any other is called after the scheme."""

_PRESETS = {"fp8": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK"}

_SEED = 20_480


@dataclass(frozen=True)
class Job:
    """What to convert, and where to."""

    source: str
    """The downloaded checkpoint."""
    made: str
    """The folder that receives a folder for each candidate, with weights, index and config.json."""
    scheme: str
    candidates: list[str]
    """Which of them to make: the scheme's name, and for awq `ROUNDED` as well."""
    group_size: int
    symmetric: bool
    ignored: list[str]
    """Modules that stay as they are; see `recipes`."""
    loader: str
    texts: list[str]
    """Calibration texts; empty when the scheme needs none."""
    tokens: int
    sample_tokens: int
    memory_bytes: int
    """How much of the model may be held in memory at once; the rest is kept on the disk meanwhile."""
    progress: str
    """A file that is replaced with {done, total, unit} as the work goes on."""
    n_grid: int = 20
    """How many scales awq tries for each group of layers; llm-compressor's own default."""

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def main() -> None:
    """Read the job named by the first argument and do it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    convert(Job(**json.loads(Path(sys.argv[1]).read_text())))


def convert(job: Job) -> None:
    """Fill the job's folder with the candidates."""
    from tasks.weights.activation_aware import convert_with_activations

    fix_randomness()
    for candidate in job.candidates:
        made = Path(job.made, candidate)
        if candidate == "awq":
            convert_with_activations(job, made)
        else:
            stream(job, made, _rounded(job) if candidate == ROUNDED else _PRESETS[candidate])


def stream(job: Job, made: Path, scheme: Any) -> None:
    """Quantize file by file, in memory of a small multiple of the largest file."""
    from llmcompressor import model_free_ptq
    from llmcompressor.entrypoints.model_free import converter

    _make_contiguous(converter.ModelFreePtqConverter)
    _split_only_what_is_quantized(converter, job.ignored)
    model_free_ptq(
        model_stub=job.source,
        save_directory=str(made),
        scheme=scheme,
        ignore=job.ignored,
        max_workers=1,
        device="cpu",
    )


def weights_of(job: Job) -> dict[str, Any]:
    """How awq stores a matrix, in compressed-tensors' terms."""
    return {
        "num_bits": 4,
        "type": "int",
        "symmetric": job.symmetric,
        "strategy": "group",
        "group_size": job.group_size,
    }


def fix_randomness() -> None:
    """So that the same job gives the same bytes."""
    import torch

    torch.manual_seed(_SEED)
    torch.use_deterministic_algorithms(True, warn_only=True)


def _rounded(job: Job) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights_of(job)))


def _make_contiguous(converter: Any) -> None:
    """safetensors refuses views, which fp8_block makes where 128 does not divide a matrix (0.14.0.1)."""
    original = converter.process
    if getattr(original, "contiguous", False):
        return

    @wraps(original)
    def process(self: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: tensor.contiguous() for name, tensor in original(self, tensors).items()}

    process.contiguous = True  # type: ignore[attr-defined]
    converter.process = process


def _split_only_what_is_quantized(converter: Any, ignored: Sequence[str]) -> None:
    """llm-compressor 0.14.0.1 cuts every tensor of experts into matrices, those that stay as they are too."""
    original: Callable[[dict[str, Any]], dict[str, Any]] = getattr(
        converter.split_fused_moe_experts, "__wrapped__", converter.split_fused_moe_experts
    )
    patterns = [re.compile(pattern.removeprefix("re:")) for pattern in ignored]

    @wraps(original)
    def split(tensors: dict[str, Any]) -> dict[str, Any]:
        kept = {name: tensor for name, tensor in tensors.items() if any(p.match(name) for p in patterns)}
        return original({name: tensor for name, tensor in tensors.items() if name not in kept}) | kept

    converter.split_fused_moe_experts = split


if __name__ == "__main__":
    main()
