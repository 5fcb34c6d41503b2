"""How much memory a worker needs, estimated from the release's config.json: for `auto` layouts and for preflight.

It is an estimate: weights and caches are exact, what vLLM needs besides is not. Everything is in bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import InputError
from tasks.gpu.instances import Profile
from tasks.spec import Serving

_MIB = 1 << 20
_GIB = 1 << 30

_CUDA_BYTES = int(0.6 * _GIB)
"""A CUDA context, cuBLAS workspaces and NCCL-free runtime of one process on Hopper; an estimate."""
_GRAPHS_BYTES = int(0.5 * _GIB)
"""vLLM's CUDA graphs; not with enforce_eager. An estimate."""
_ACTIVATIONS = 14
"""Bytes of activations for each element of hidden_size and each token of a step: half-precision tensors of one
layer, of which about seven live at once. An estimate."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides how much memory its caches take."""

    hidden_size: int
    vocabulary: int
    kv_heads: int
    head_dim: int
    full_attention_layers: int
    linear_layers: int
    """Layers with a recurrent state for each sequence instead of a KV cache (Qwen3.5: 24 of 32 in the 9B)."""
    linear_state_elements: int = 0
    """Of one sequence in one such layer: value heads x key dimension x value dimension."""
    linear_conv_elements: int = 0
    """Of one sequence in one such layer: channels of the convolution x (kernel - 1)."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From a config.json.

        Raises:
            InputError: it does not say what is needed.
        """
        text = config.get("text_config", config)
        try:
            heads = int(text["num_attention_heads"])
            hidden = int(text["hidden_size"])
            layers = int(text["num_hidden_layers"])
            full = _full_attention_layers(text, layers)
            key = int(text.get("linear_num_key_heads", 0)) * int(text.get("linear_key_head_dim", 0))
            value = int(text.get("linear_num_value_heads", 0)) * int(text.get("linear_value_head_dim", 0))
            return cls(
                hidden_size=hidden,
                vocabulary=int(text["vocab_size"]),
                kv_heads=int(text.get("num_key_value_heads") or heads),
                head_dim=int(text.get("head_dim") or hidden // heads),
                full_attention_layers=full,
                linear_layers=layers - full,
                linear_state_elements=value * int(text.get("linear_key_head_dim", 0)),
                linear_conv_elements=(2 * key + value) * (int(text.get("linear_conv_kernel_dim", 4)) - 1),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"model.repo: config.json does not say how large the model is ({error})"
            ) from None


@dataclass(frozen=True)
class Estimate:
    """The memory of one worker, in bytes, by what takes it."""

    weights: int
    kv_cache: int
    """Of max_num_seqs sequences of max_model_len, or what kv_cache_memory_mb says."""
    kv_cache_least: int
    """Of one sequence of max_model_len: with less vLLM does not start."""
    recurrent_state: int
    overhead: int
    utilization: float
    """The share of a device that a worker may take; the rest is headroom."""

    @property
    def total(self) -> int:
        """What a worker uses that never waits for cache."""
        return self.weights + self.kv_cache + self.recurrent_state + self.overhead

    @property
    def least(self) -> int:
        """What a worker cannot do without."""
        return self.weights + min(self.kv_cache, self.kv_cache_least) + self.recurrent_state + self.overhead

    def fits(self, device_bytes: int) -> bool:
        """Whether a device holds a worker that never waits for cache."""
        return self.total <= device_bytes * self.utilization

    def can_start(self, device_bytes: int) -> bool:
        """Whether a device holds a worker at all."""
        return self.least <= device_bytes * self.utilization

    def describe(self) -> str:
        """The numbers, for a person."""
        return (
            f"weights {_gib(self.weights)} + KV cache {_gib(self.kv_cache)} + recurrent state "
            f"{_gib(self.recurrent_state)} + overhead {_gib(self.overhead)} = {_gib(self.total)} GiB (at least "
            f"{_gib(self.least)}), of {self.utilization:.0%} of a device"
        )

    def document(self) -> dict[str, float]:
        """The numbers in GiB."""
        parts = ("weights", "kv_cache", "kv_cache_least", "recurrent_state", "overhead", "total", "least")
        return {f"{name}_gib": round(getattr(self, name) / _GIB, 2) for name in parts} | {
            "utilization": self.utilization
        }


def estimate(shape: ModelShape, weights_bytes: int, serving: Serving) -> Estimate:
    """What one worker needs that serves a release of `weights_bytes`."""
    per_token = kv_cache_bytes_per_token(shape, serving.kv_cache_dtype)
    whole = serving.sequences * serving.max_model_len * per_token
    if serving.kv_cache_memory_mb is not None:
        whole = serving.kv_cache_memory_mb * _MIB
    graphs = 0 if serving.enforce_eager else _GRAPHS_BYTES
    activations = serving.max_num_batched_tokens * shape.hidden_size * _ACTIVATIONS
    logits = serving.sequences * shape.vocabulary * 4
    return Estimate(
        weights=weights_bytes,
        kv_cache=whole,
        kv_cache_least=serving.max_model_len * per_token,
        recurrent_state=serving.sequences * recurrent_state_bytes(shape),
        overhead=_CUDA_BYTES + graphs + activations + logits,
        utilization=serving.gpu_memory_utilization,
    )


def kv_cache_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Of one token, over all layers that hold a KV cache; the others hold a state for each sequence."""
    element = 1 if dtype == "fp8" else 2
    return 2 * shape.full_attention_layers * shape.kv_heads * shape.head_dim * element


def recurrent_state_bytes(shape: ModelShape) -> int:
    """Of one sequence: the state in 32 bits, the convolution's last inputs in 16."""
    return shape.linear_layers * (4 * shape.linear_state_elements + 2 * shape.linear_conv_elements)


def of_folder(folder: Path, weights_bytes: int, serving: Serving) -> Estimate:
    """For the checkpoint in `folder`.

    Raises:
        InputError: its config.json cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"model.repo: there is no readable config.json in {folder} ({error})") from None
    return estimate(ModelShape.of(config), weights_bytes, serving)


def of_facts(release: Mapping[str, Any], serving: Serving) -> Estimate | None:
    """For the release that `convert` found; None where it does not say how large that is."""
    return of_folder(Path(release["path"]), int(release["bytes"]), serving) if "bytes" in release else None


def smallest(profiles: Sequence[Profile], needs: Estimate) -> Profile:
    """The profile for an `auto` layout: the smallest that holds a worker; else the largest, where one can start.

    Raises:
        InputError: not even the largest lets a worker start.
    """
    # Of equal memory the one that uses more of the GPU's compute; media engines are of no use here.
    ordered = sorted(
        (each for each in profiles if "+" not in each.name and "-" not in each.name),
        key=lambda each: (each.memory_mb, -each.compute_slices * each.most),
    )
    for profile in ordered:
        if needs.fits(profile.memory_mb * _MIB):
            return profile
    if ordered and needs.can_start(ordered[-1].memory_mb * _MIB):
        return ordered[-1]
    largest = (
        f"the largest, {ordered[-1].name}, has {_gib(ordered[-1].memory_mb * _MIB)} GiB" if ordered else ""
    )
    raise InputError(
        f"layout.mig: no profile of this GPU holds a worker: {needs.describe()}; {largest or 'it offers none'}. "
        f"Lower serving.max_num_seqs or max_model_len, convert to a smaller scheme, or use full GPUs with "
        f"layout.tensor_parallel"
    )


def _full_attention_layers(text: Mapping[str, Any], layers: int) -> int:
    if "layer_types" in text:
        return sum("linear" not in kind for kind in text["layer_types"])
    if "full_attention_interval" in text:
        return layers // int(text["full_attention_interval"])
    return layers


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"
