"""Damage copies of a checkpoint, each in one way, and measure them. Run in the converting environment:

    python damage.py BASE MADE WORK

MADE is a candidate's folder (weights and scales); WORK/DAMAGE receives each damaged copy and WORK/measured.json
what was found.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convert_all import measure
from safetensors.torch import load_file, save_file

LAYER = "model.layers.1.self_attn.q_proj"
NEIGHBOUR = "model.layers.0.self_attn.q_proj"


def weight_of(tensors: dict[str, Any], layer: str) -> str:
    return next(f"{layer}.{name}" for name in ("weight", "weight_packed") if f"{layer}.{name}" in tensors)


def halve_a_scale(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}.weight_scale"] /= 2


def flip_rows(tensors: dict[str, Any]) -> None:
    name = weight_of(tensors, LAYER)
    rows = tensors[name]
    tensors[name] = rows[list(range(len(rows) - 1, -1, -1))].contiguous()


def swap_with_the_neighbour(tensors: dict[str, Any]) -> None:
    one, other = weight_of(tensors, LAYER), weight_of(tensors, NEIGHBOUR)
    tensors[one], tensors[other] = tensors[other], tensors[one]


DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a scale halved": halve_a_scale,
    "rows flipped": flip_rows,
    "swapped with its neighbour": swap_with_the_neighbour,
}


def main(base: Path, made: Path, work: Path) -> None:
    candidates = {"sound": made}
    for name, damage in DAMAGES.items():
        candidates[name] = shutil.copytree(made, work / name)
        weights = {}
        for file in sorted(candidates[name].glob("*.safetensors")):
            weights |= load_file(file)
            file.unlink()
        damage(weights)
        save_file(weights, candidates[name] / "model.safetensors", {"format": "pt"})
    report = measure(base, candidates)
    (work / "measured.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
