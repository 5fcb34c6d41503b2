"""Tiny checkpoints, converted by the real converter; and measurements, real and made up."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tasks.node import processes
from tasks.settings import Settings
from tasks.weights import gate
from tests.weights.world import REPO, World

HERE = Path(__file__).parent
NAMES = ("qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_vl", "qwen3_5_moe", "qwen3_5_moe_vl")
CANDIDATES = {
    "fp8": ["fp8"],
    "fp8_block": ["fp8_block"],
    "awq": ["awq", "rtn"],
    "awq-symmetric": ["rtn"],
    "awq-on-disk": ["awq"],
}
EVERYTHING = bool(os.environ.get("QWEN_TEST_EVERYTHING"))
AWQ = NAMES if EVERYTHING else ("qwen2", "qwen3_5_moe_vl")
"""awq takes longest; these two have all that the others have."""
ON_DISK = ("qwen2", "qwen3_moe", "qwen3_5_moe_vl") if EVERYTHING else ("qwen2",)
"""Converted a second time with less memory than the model takes."""
CONVERTED = [
    *((name, scheme) for name in NAMES for scheme in ("fp8", "fp8_block")),
    *((name, "awq") for name in AWQ),
    *((name, "awq-on-disk") for name in ON_DISK),
    ("qwen2", "awq-symmetric"),
]


def run_in_converting_environment(script: str, *arguments: Path | str) -> None:
    subprocess.run(
        [Settings().python_convert, HERE / script, *arguments],
        check=True,
        env=processes.environment("tests/converting", {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}),
        stdout=subprocess.DEVNULL,
        timeout=2400,
    )


def measurements(report: Path) -> dict[str, gate.Measured]:
    return {name: gate.Measured(**found) for name, found in json.loads(report.read_text()).items()}


def measurement(**changes: Any) -> gate.Measured:
    sound = {
        "perplexity": 10.1,
        "base_perplexity": 10.0,
        "kl": 0.01,
        "top1_agreement": 0.9,
        "tokens": 256,
        "losses": [],
        "opening": [1, 2],
        "opening_loss": 2.0,
        "weight_errors": {"layer": 0.1},
        "kept_errors": {},
        "scaled": [],
    }
    return gate.Measured(**{**sound, **changes})


def serve(world: World, checkpoint: Path) -> None:
    shutil.rmtree(world.repositories / REPO)
    shutil.copytree(checkpoint, world.repositories / REPO)
