"""Convert a checkpoint to fp8 and print the process's peak memory before and after, in bytes.

Run in the converting environment: `python peak_memory.py BASE MADE`. A conversion of one small file comes first,
so that what the libraries load on their way counts as before.
"""

import json
import resource
import sys
from pathlib import Path

from safetensors.numpy import save_file

from tasks.weights import converting, recipes, tensors


def convert(base: Path, made: Path) -> None:
    recipe = recipes.of(tensors.read_config(base))
    converting.stream(
        converting.Job(
            source=str(base),
            made=str(made),
            scheme="fp8",
            candidates=["fp8"],
            group_size=128,
            symmetric=False,
            ignored=list(recipe.ignored),
            loader=recipe.loader,
            texts=[],
            tokens=0,
            sample_tokens=0,
            n_grid=4,
            memory_bytes=0,
            progress="",
        ),
        made,
        "FP8_DYNAMIC",
    )
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}", flush=True)


def main(base: Path, made: Path) -> None:
    import numpy

    small = made.parent / "small"
    small.mkdir()
    (small / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    )
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({name: numpy.ones((512, 512), numpy.float16)}, small / "model.safetensors")
    convert(small, made.parent / "small-made")
    convert(base, made)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
