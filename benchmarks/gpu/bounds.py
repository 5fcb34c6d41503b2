"""How fast the card could be at most: what must be read from memory and computed, over what was measured of it.

A decoding step reads every weight once, whatever the number of sequences; of each sequence it reads the KV
cache of the full-attention layers, and reads and writes the recurrent state of the others. A step cannot be
faster than its bytes over the memory's bandwidth, nor than its operations over the matrix units' rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Of a hybrid model, from its text config."""

    hidden: int
    intermediate: int
    vocabulary: int
    layers: int
    full_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linear_key_heads: int
    linear_value_heads: int
    linear_head_dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """From config.json."""
        text = config.get("text_config", config)
        layers = text["num_hidden_layers"]
        return cls(
            text["hidden_size"],
            text["intermediate_size"],
            text["vocab_size"],
            layers,
            text["layer_types"].count("full_attention"),
            text["num_attention_heads"],
            text["num_key_value_heads"],
            text["head_dim"],
            text["linear_num_key_heads"],
            text["linear_num_value_heads"],
            text["linear_value_head_dim"],
        )

    @property
    def layer_parameters(self) -> int:
        """Of all layers' matrices; norms and convolutions are too small to matter."""
        mlp = 3 * self.hidden * self.intermediate
        query = self.heads * self.head_dim
        # The query is projected together with an output gate of its size.
        full = self.hidden * (2 * query + 2 * self.kv_heads * self.head_dim) + query * self.hidden
        key, value = (
            count * self.linear_head_dim for count in (self.linear_key_heads, self.linear_value_heads)
        )
        linear = self.hidden * (2 * key + 2 * value + 2 * self.linear_value_heads) + value * self.hidden
        return self.layers * mlp + self.full_layers * full + (self.layers - self.full_layers) * linear

    @property
    def head_parameters(self) -> int:
        """Of the output head; the embedding is looked up, not multiplied."""
        return self.vocabulary * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """In bfloat16, over the full-attention layers."""
        return 2 * 2 * self.full_layers * self.kv_heads * self.head_dim

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence in float32, over the other layers."""
        linear_layers = self.layers - self.full_layers
        return 4 * linear_layers * self.linear_value_heads * self.linear_head_dim**2


def decode_step(
    shape: Shape, sequences: int, context_tokens: float, layer_bytes: float = 2.0
) -> dict[str, float]:
    """Bytes and operations of one step that gives each of `sequences` one token.

    Args:
        context_tokens: mean length of what a sequence attends to.
        layer_bytes: of one weight of a layer: 2 bfloat16, 1 FP8, 0.5 and scales AWQ; the head is bfloat16.
    """
    weights = shape.layer_parameters * layer_bytes + shape.head_parameters * 2
    kv = sequences * context_tokens * shape.kv_bytes_per_token
    state = 2 * sequences * shape.state_bytes
    attention = 4 * sequences * context_tokens * shape.full_layers * shape.heads * shape.head_dim
    operations = 2 * sequences * (shape.layer_parameters + shape.head_parameters) + attention
    return {"weight_bytes": weights, "kv_bytes": kv, "state_bytes": state, "operations": operations}


def bounds(
    shape: Shape,
    *,
    sequences: int,
    prompt_tokens: int,
    answer_tokens: int,
    bytes_per_s: float,
    operations_per_s: float,
    layer_operations_per_s: float | None = None,
    layer_bytes: float = 2.0,
) -> dict[str, float]:
    """Output tokens per second that cannot be exceeded by rows of equal length, `sequences` of them at all times.

    `memory` and `compute` are each worked out as if the other cost nothing. `in_turn` is what kernels could
    reach that run one after the other, as an engine's do: each part of a step takes what its bytes or its
    operations take, whichever is more, and each row's prefill comes on top.

    Args:
        bytes_per_s: measured, by a copy.
        operations_per_s: measured, by a large matrix product in bfloat16.
        layer_operations_per_s: the same in the type that the layers compute in; by default bfloat16 too.
    """
    layers_per_s = layer_operations_per_s or operations_per_s
    step = decode_step(shape, sequences, prompt_tokens + answer_tokens / 2, layer_bytes)
    step_bytes = step["weight_bytes"] + step["kv_bytes"] + step["state_bytes"]
    layers_s = 2 * sequences * shape.layer_parameters / layers_per_s
    head_s = 2 * sequences * shape.head_parameters / operations_per_s
    prefill_s = 2 * prompt_tokens * shape.layer_parameters / layers_per_s
    in_turn_s = (
        max(layers_s, shape.layer_parameters * layer_bytes / bytes_per_s)
        + max(head_s, shape.head_parameters * 2 / bytes_per_s)
        + (step["kv_bytes"] + step["state_bytes"]) / bytes_per_s
    )

    def tokens_per_s(step_s: float, row_s: float) -> float:
        return round(sequences * answer_tokens / (answer_tokens * step_s + sequences * row_s), 0)

    return {
        "step_weight_gb": round(step["weight_bytes"] / 1e9, 2),
        "step_kv_gb": round(step["kv_bytes"] / 1e9, 2),
        "step_state_gb": round(step["state_bytes"] / 1e9, 2),
        "step_ms_in_turn": round(in_turn_s * 1e3, 2),
        "row_prefill_ms": round(prefill_s * 1e3, 2),
        "memory": tokens_per_s(step_bytes / bytes_per_s, 0.0),
        "compute": tokens_per_s(layers_s + head_s, prefill_s),
        "in_turn": tokens_per_s(in_turn_s, prefill_s),
    }
