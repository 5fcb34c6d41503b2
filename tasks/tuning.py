"""Defaults by GPU, model and scheme: what the spec leaves open is taken from here, with the measurement behind it.

Keeps: what the spec says is never overruled; where nothing was measured the general default stands; a line
holds for what it was measured on and nothing near it (a whole GPU for one worker, most of its memory). A line
that was measured with another vLLM than the installed one says so: its gain is expected, not measured.
docs/performance.md has the tables, benchmarks/results the runs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.spec import Serving

_LEAST_UTILIZATION = 0.8
"""Of the GPU's memory: with less of it, as many sequences were not measured and may not fit."""


@dataclass(frozen=True)
class Model:
    """By its shape, so that it is known in a folder of any name, fine-tuned or not."""

    name: str
    architectures: frozenset[str]
    hidden_size: int
    layers: int

    def is_in(self, config: Mapping[str, Any]) -> bool:
        """Whether config.json describes it."""
        text = config.get("text_config") or config
        return (
            bool(self.architectures.intersection(config.get("architectures") or ()))
            and text.get("hidden_size") == self.hidden_size
            and text.get("num_hidden_layers") == self.layers
        )


@dataclass(frozen=True)
class Line:
    """What is best for one GPU, model and scheme, as far as it was measured."""

    gpu: str
    """As the driver calls the whole card."""
    model: Model
    scheme: str
    max_num_seqs: int
    why: str
    vllm: str
    """The version it was measured with."""
    better: str = ""
    """What another scheme does better, where one was measured to be faster."""

    def describe(self, installed: str) -> str:
        """For a person; `installed` is the version of vLLM that will serve."""
        measured = f"measured with vLLM {self.vllm}"
        if installed != self.vllm:
            measured += f"; expected, not measured, of {installed}"
        return f"{self.model.name}, {self.scheme}, {self.gpu}: {self.why} ({measured})"


QWEN3_5_9B = Model(
    "Qwen3.5-9B",
    frozenset({"Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"}),
    hidden_size=4096,
    layers=32,
)

_H200 = "NVIDIA H200"

LINES = (
    Line(
        *(_H200, QWEN3_5_9B, "fp8", 512),
        why="512 sequences give 11 to 14% more tokens/s than 256 for 256 tokens in and 512 out, and 5% more rows/s "
        "for 2,048 in and 128 out, both through the dispatcher; 1,024 were not measured",
        vllm="0.26.0",
    ),
    Line(
        *(_H200, QWEN3_5_9B, "none", 512),
        why="512 sequences give 5% more tokens/s than 256 for 256 tokens in and 512 out, offline",
        vllm="0.26.0",
        better="fp8 gives 27% more rows/s for 2,048 tokens in and 128 out (256 sequences), and 11% more tokens/s for "
        "256 in and 512 out (512 sequences)",
    ),
    Line(
        *(_H200, QWEN3_5_9B, "awq", 256),
        why="256 sequences are what was measured",
        vllm="0.26.0",
        better="fp8 gives 9% more tokens/s for 256 tokens in and 512 out with as many sequences, and 21% with 512; "
        "awq takes 3 GiB less for its weights",
    ),
)


def find(gpu: str, config: Mapping[str, Any], scheme: str | None = None) -> Line | None:
    """The line for a whole GPU of that name.

    Args:
        scheme: of the release to be made of this checkpoint; None: as the checkpoint itself is quantized.
    """
    wanted = scheme or scheme_of(config)
    return next(
        (one for one in LINES if one.gpu == gpu and one.scheme == wanted and one.model.is_in(config)), None
    )


def settled(serving: Serving, line: Line | None) -> Serving:
    """`serving` with a number where it leaves the number of sequences open."""
    if serving.max_num_seqs is not None:
        return serving
    open_to = line is not None and is_as_measured(serving)
    sequences = line.max_num_seqs if line is not None and open_to else serving.sequences
    return serving.model_copy(update={"max_num_seqs": sequences})


def is_as_measured(serving: Serving) -> bool:
    """Whether a worker gets so much memory that a line of the table holds for it."""
    return serving.kv_cache_memory_mb is None and serving.gpu_memory_utilization >= _LEAST_UTILIZATION


def scheme_of(config: Mapping[str, Any]) -> str:
    """The scheme of the spec that a checkpoint is quantized by; `none` for one that is not."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return "none"
    if quantization.get("format") != "float-quantized":
        return "awq"
    groups = quantization.get("config_groups") or {}
    blocks = any((group.get("weights") or {}).get("strategy") == "block" for group in groups.values())
    return "fp8_block" if blocks else "fp8"


def config_of(folder: Path) -> dict[str, Any]:
    """config.json; empty where it cannot be read: then no line matches."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
