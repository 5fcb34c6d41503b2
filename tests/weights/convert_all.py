"""Make the tiny checkpoints and convert each with every scheme.

In one process, because importing the libraries takes longest. Run in the converting environment:
`python convert_all.py FOLDER` fills FOLDER/base and FOLDER/made/NAME-SCHEME.
"""

import sys
from pathlib import Path

import make_checkpoints

from tasks.weights import calibration, converting, recipes, tensors

SCHEMES = ("fp8", "fp8_block", "awq")
GROUP_SIZE = 64


def main(folder: Path) -> None:
    make_checkpoints.make(folder / "base")
    for name in make_checkpoints.NAMES:
        base = folder / "base" / name
        recipe = recipes.of(tensors.read_config(base))
        for scheme in SCHEMES:
            made = folder / "made" / f"{name}-{scheme}"
            made.mkdir(parents=True)
            converting.convert(
                converting.Job(
                    source=str(base),
                    made=str(made),
                    scheme=scheme,
                    group_size=GROUP_SIZE,
                    ignored=list(recipe.ignored),
                    loader=recipe.loader,
                    texts=calibration.texts(None, 256),
                    tokens=256,
                    sample_tokens=calibration.SAMPLE_TOKENS,
                    progress=str(folder / "progress.json"),
                )
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
