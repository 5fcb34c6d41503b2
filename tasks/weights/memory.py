"""How much memory a conversion takes, reckoned before it starts and refused with numbers when it cannot fit.

fp8 and plain rounding stream: two copies of the largest file. awq holds the model in float32, and what does not
fit of it on the disk; at least one layer, thrice (itself, as it was, and rounded), and the ends of the model
must fit, and later one file of what came out. Measuring holds one layer and the ends of the model.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tasks.errors import StageFailed
from tasks.weights.activation_aware import SHARD_BYTES
from tasks.weights.tensors import Tensor

_LIBRARIES_BYTES = int(1.6 * 2**30)
"""Of a child that has imported the converting libraries and works: see docs/weights.md for what was seen."""

_FLOAT32_BYTES = 4
_COPIES_OF_A_LAYER = 3
_STATES_OF_A_TOKEN = 40
"""Vectors of the model's width that are alive for each token while one layer works, as float32."""

_LAYER = re.compile(r"(.*\blayers\.\d+)\.")


@dataclass(frozen=True)
class Need:
    """Bytes that a conversion takes."""

    least_bytes: int
    """Without which it cannot work."""
    model_bytes: int
    """Of the whole model in float32, where it is held; what does not fit is kept on the disk."""

    def in_memory_bytes(self, available_bytes: int) -> int:
        """How much of the model may be held in memory."""
        return max(0, available_bytes - self.least_bytes)

    def on_disk_bytes(self, available_bytes: int) -> int:
        """How much of the model must be kept on the disk."""
        return max(0, self.model_bytes - self.in_memory_bytes(available_bytes))

    def all_in_memory(self) -> "Need":
        """The same for a converter that keeps nothing on the disk."""
        return Need(self.least_bytes + self.model_bytes, 0)


def need(stored: Mapping[str, Tensor], scheme: str, tokens: int) -> Need:
    """What converting this checkpoint takes.

    Args:
        stored: the base's tensors.
        tokens: that are calibrated or measured with, the larger of the two.
    """
    files: dict[str, int] = defaultdict(int)
    layers: dict[str, int] = defaultdict(int)
    for name, tensor in stored.items():
        files[tensor.file] += tensor.bytes
        place = _LAYER.match(name)
        layers[place[1] if place else name] += prod(tensor.shape) * _FLOAT32_BYTES
    layer = max(layers.values(), default=0)
    ends = sum(
        2 * layers[name] for name in layers if name.endswith(("embed_tokens.weight", "lm_head.weight"))
    )
    width = min((t.shape[-1] for n, t in stored.items() if n.endswith("embed_tokens.weight")), default=0)
    states = tokens * width * _STATES_OF_A_TOKEN * _FLOAT32_BYTES
    streaming = 2 * max(files.values(), default=0)
    measuring = layer + ends + states
    if scheme != "awq":
        return Need(_LIBRARIES_BYTES + max(streaming, measuring), 0)
    converting = _COPIES_OF_A_LAYER * layer + ends + states
    saving = min(SHARD_BYTES, sum(tensor.bytes for tensor in stored.values()))
    whole = sum(prod(tensor.shape) for tensor in stored.values()) * _FLOAT32_BYTES
    return Need(_LIBRARIES_BYTES + max(streaming, measuring, converting, saving), whole)


def require(wanted: Need, available_bytes: int, what: str) -> None:
    """Refuse what cannot fit.

    Raises:
        StageFailed: less is free than is needed at least.
    """
    if available_bytes < wanted.least_bytes:
        raise StageFailed(
            f"{what} needs at least {wanted.least_bytes / 1e9:.2f} GB of memory and "
            f"{available_bytes / 1e9:.2f} GB are free here: end what takes it, or convert on a node with more"
        )


def available() -> int:
    """Bytes of memory that a new process can take: what the host has free, within the container's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    return min(free, _left_in_cgroup() or free)


def _left_in_cgroup() -> int | None:
    for limit, usage, stat, cached in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        top = Path("/sys/fs/cgroup")
        try:
            counters = dict(line.split() for line in (top / stat).read_text().splitlines())
            used = int((top / usage).read_text()) - int(counters.get(cached, 0))
            return int((top / limit).read_text()) - used
        except (OSError, ValueError):  # ValueError: "max", no limit
            continue
    return None
