"""Make the tiny checkpoints, convert them, and measure what came out.

In one process, because importing the libraries takes longest. Run in the converting environment:
`python convert_all.py FOLDER [--times N] NAME:SCHEME ...` fills FOLDER/base, FOLDER/made/NAME-SCHEME/CANDIDATE
and FOLDER/measured/NAME-SCHEME.json; with --times the layers are as many times as wide.
"""

import argparse
import json
from pathlib import Path

import make_checkpoints

from tasks.weights import calibration, converting, measuring, recipes, tensors
from tasks.weights.scales import SCALES

CANDIDATES = {
    "fp8": ["fp8"],
    "fp8_block": ["fp8_block"],
    "awq": ["rtn", "awq"],
    "awq-symmetric": ["rtn"],
    "awq-on-disk": ["awq"],
}
GROUP_SIZE = 64
LITTLE_MEMORY_BYTES = 600_000
"""Less than the smallest of the models takes in float32."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("wanted", nargs="+")
    given = parser.parse_args()
    wanted = [one.split(":") for one in given.wanted]
    make_checkpoints.make(given.folder / "base", [name for name, _ in wanted], given.times)
    for name, scheme in wanted:
        convert(given.folder, name, scheme)


def convert(folder: Path, name: str, scheme: str) -> None:
    base, made = folder / "base" / name, folder / "made" / f"{name}-{scheme}"
    recipe = recipes.of(tensors.read_config(base))
    made.mkdir(parents=True)
    converting.convert(
        converting.Job(
            source=str(base),
            made=str(made),
            scheme=scheme.partition("-")[0],
            candidates=CANDIDATES[scheme],
            group_size=GROUP_SIZE,
            symmetric=scheme.endswith("symmetric"),
            ignored=list(recipe.ignored),
            loader=recipe.loader,
            texts=calibration.texts(None, 256),
            tokens=256,
            sample_tokens=calibration.SAMPLE_TOKENS,
            n_grid=4,
            memory_bytes=LITTLE_MEMORY_BYTES if scheme.endswith("on-disk") else 2**40,
            progress=str(folder / "progress.json"),
        )
    )
    report = folder / "measured" / f"{made.name}.json"
    report.parent.mkdir(exist_ok=True)
    report.write_text(json.dumps(measure(base, {one.name: one for one in made.iterdir()})))


def measure(base: Path, candidates: dict[str, Path]) -> dict[str, dict[str, object]]:
    """What `measuring` finds, on fewer tokens than a release is measured on."""
    scales = {name: folder / SCALES for name, folder in candidates.items()}
    return measuring.measure(
        measuring.Job(
            base=str(base),
            candidates={name: str(folder) for name, folder in candidates.items()},
            scales={name: str(path) for name, path in scales.items() if path.exists()},
            texts=calibration.held_out(None, 512),
            tokens=512,
            sample_tokens=128,
            report="",
        )
    )


if __name__ == "__main__":
    main()
