"""Measure candidates against their base. Runs in the converting environment, as a child of the stage:

    PYTHON -m tasks.weights.measuring JOB.json

Three numbers, because each is blind to something that another sees: perplexity and KL divergence of the next
token on held-out text, and the error of every matrix (a halved scale moves the KL of one layer by little, and
its matrix by half).

Keeps: one layer of one model is in memory at a time, in float32, so that any model that could be converted can
be measured; the verdict is not made here.
"""

import json
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.weights import recipes, tensors
from tasks.weights.checkpoint import Checkpoint
from tasks.weights.scales import Scales
from tasks.weights.streamed import Streamed

log = logging.getLogger("measuring")


@dataclass(frozen=True)
class Job:
    """What to measure."""

    base: str
    candidates: dict[str, str]
    """Name to folder."""
    scales: dict[str, str]
    """Name to the file of scales, for those that have one."""
    texts: list[str]
    tokens: int
    sample_tokens: int
    report: str
    """The file that receives {candidate: measurement}."""

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def main() -> None:
    """Read the job named by the first argument and do it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    Path(job.report).write_text(json.dumps(measure(job), indent=1))


def measure(job: Job) -> dict[str, dict[str, Any]]:
    """Perplexity, KL and errors of each candidate, as `gate` reads them."""
    import torch

    with torch.inference_mode():
        recipe = recipes.RECIPES[recipes.architecture(tensors.read_config(Path(job.base)))]
        base = Checkpoint(Path(job.base), recipe)
        samples = torch.tensor(
            tensors.sequences(job.base, job.texts, job.tokens, job.sample_tokens, "convert.gate.texts")
        )
        model = Streamed(base)
        expected = model.hidden_states(base, samples)
        report = {}
        for name, folder in job.candidates.items():
            candidate = Checkpoint(Path(folder), recipe)
            noted = Path(job.scales[name]) if name in job.scales else None
            scales = Scales(noted, offset_norms=recipe.offset_norms)
            errors = weight_errors(base, candidate, scales)
            found = model.hidden_states(candidate, samples)
            compared = model.compare(samples, (base, expected), (candidate, found))
            report[name] = {**compared, **errors, "tokens": samples.numel()}
            log.info("%s: %s", name, compared)
    return report


def weight_errors(base: Checkpoint, candidate: Checkpoint, scales: Scales) -> dict[str, Any]:
    """Error of every quantized matrix; and of what must be as it was, what is not."""
    quantized = {
        matrix.removesuffix(".weight"): _error(scales.apply(matrix, base.values(matrix)), candidate, matrix)
        for matrix in base.matrices()
    }
    changed, scaled = {}, []
    for name, tensor in base.stored.items():
        if base.recipe.matrices(name, tensor.shape):
            continue
        if scales.touch(name):
            scaled.append(name)
            changed[name] = _error(scales.apply(name, base.values(name)), candidate, name)
        elif not _same_bits(base.raw(name), candidate.raw(name)):
            changed[name] = _error(base.values(name), candidate, name)
    return {"weight_errors": quantized, "kept_errors": changed, "scaled": scaled}


def _error(expected: Any, candidate: Checkpoint, name: str) -> float:
    """Norm of the difference over the norm of what is expected."""
    difference = (candidate.values(name) - expected).norm()
    return float(difference / expected.norm().clamp(min=1e-12))


def _same_bits(one: Any, other: Any) -> bool:
    import torch

    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same_form = one.dtype == other.dtype and one.shape == other.shape
    return same_form and bool(torch.equal(one.contiguous().view(bits), other.contiguous().view(bits)))


if __name__ == "__main__":
    main()
