"""Convert a model of twelve wide layers to awq with that much memory for it, and print the process's peak in bytes.

Run in the converting environment: `python peak_memory_awq.py BASE MADE MEMORY_BYTES`; makes BASE when it is not there.
"""

import resource
import sys
from pathlib import Path

import make_checkpoints

from tasks.weights import calibration, converting, recipes, tensors

WIDTH, LAYERS = 1024, 12


def main(base: Path, made: Path, memory_bytes: int) -> None:
    if not base.exists():
        make_checkpoints.write_wide(base, WIDTH, LAYERS)
    recipe = recipes.of(tensors.read_config(base))
    converting.convert(
        converting.Job(
            source=str(base),
            made=str(made),
            scheme="awq",
            candidates=["awq"],
            group_size=64,
            symmetric=False,
            ignored=list(recipe.ignored),
            loader=recipe.loader,
            texts=calibration.texts(None, 256),
            tokens=256,
            sample_tokens=calibration.SAMPLE_TOKENS,
            n_grid=4,
            memory_bytes=memory_bytes,
            progress=str(made.parent / "progress.json"),
        )
    )
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
