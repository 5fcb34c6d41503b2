"""What is quantized and what is not, by architecture.

`ignored` are regular expressions over module names, in the form llm-compressor takes (`re:` first). What the
lists keep in full precision and why:

- lm_head and embeddings: every token passes them, and they are a small part of a large model.
- routers (`mlp.gate`) and the gate of the shared expert: a few rows that decide which experts a token sees.
- conv1d and in_proj_a/b of a gated delta net: no matrix, or so few rows that quantizing saves nothing and
  disturbs the recurrent state. in_proj_qkv and in_proj_z share one scheme: vLLM fuses them.
- the vision tower (`visual`) and the multi-token-prediction layer (`mtp`): not on the path of text answers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.errors import InputError

_HEADS = ("re:.*lm_head$", "re:.*embed_tokens$")
_ROUTER = (r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$")
_DELTA_NET = (r"re:.*linear_attn\.in_proj_[ab]$", r"re:.*linear_attn\.conv1d$")
_BESIDE_TEXT = ("re:.*visual.*", "re:mtp.*")

_VISION_LOADER = "AutoModelForImageTextToText"


@dataclass(frozen=True)
class Recipe:
    """How one architecture is converted."""

    ignored: tuple[str, ...]
    """Modules that stay as they are."""
    loader: str = "AutoModelForCausalLM"
    """The class of transformers that loads the whole checkpoint, for schemes that need the model itself."""
    experts: bool = False
    """Whether its layers hold a mixture of experts."""
    offset_norms: bool = False
    """Whether its norms multiply by 1 + weight, so that scaling one means scaling that sum."""
    converters: tuple[str, ...] = ("llm-compressor",)
    """What can convert it to awq."""

    @property
    def hybrid(self) -> bool:
        """Whether some of its layers are gated delta nets: vLLM's CPU kernels compute those in bfloat16 alone."""
        return any("linear_attn" in pattern for pattern in self.ignored)

    def keeps(self, module: str) -> bool:
        """Whether the module of that name stays as it is."""
        return any(re.match(pattern.removeprefix("re:"), module) for pattern in self.ignored)

    def matrices(self, name: str, shape: Sequence[int]) -> dict[str, tuple[int, int]]:
        """The matrices that the tensor `name` is quantized as, by the names they get; none when it is kept.

        A matrix is itself. The experts of a layer may lie in one tensor of three dimensions
        (`experts.gate_up_proj`: [experts, gate rows and then up rows, inputs]); each becomes its own matrices.
        """
        if len(shape) == 3 and self.experts and not self.keeps(name):
            return {
                part: (rows.stop - rows.start, shape[2])
                for part, (_, rows) in cut_experts(name, shape).items()
            }
        module, _, kind = name.rpartition(".")
        if kind != "weight" or len(shape) != 2 or module.endswith("norm") or self.keeps(module):
            return {}
        return {name: (shape[0], shape[1])}


def cut_experts(name: str, shape: Sequence[int]) -> dict[str, tuple[int, slice]]:
    """Where each expert's matrices lie in the tensor that holds those of all: index, and rows; by their names.

    Empty for a tensor of three dimensions that holds no experts.
    """
    owner, _, kind = name.removesuffix(".weight").rpartition(".")
    if not owner.endswith("experts") or kind not in _PARTS:
        return {}
    parts = _PARTS[kind]
    rows = shape[1] // len(parts)
    return {
        f"{owner}.{index}.{part}.weight": (index, slice(number * rows, (number + 1) * rows))
        for index in range(shape[0])
        for number, part in enumerate(parts)
    }


_PARTS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}

_QWEN2_LIKE = Recipe(_HEADS, converters=("llm-compressor", "autoawq"))
_QWEN3_5 = (*_HEADS, *_DELTA_NET)

RECIPES: Mapping[str, Recipe] = {
    "Qwen2ForCausalLM": _QWEN2_LIKE,  # Qwen2.5 as well
    "Qwen3ForCausalLM": _QWEN2_LIKE,
    "Qwen3MoeForCausalLM": Recipe((*_HEADS, *_ROUTER), experts=True),
    "Qwen3_5ForCausalLM": Recipe((*_QWEN3_5, "re:mtp.*"), offset_norms=True),
    "Qwen3_5ForConditionalGeneration": Recipe(
        (*_QWEN3_5, *_BESIDE_TEXT), loader=_VISION_LOADER, offset_norms=True
    ),
    "Qwen3_5MoeForCausalLM": Recipe((*_QWEN3_5, *_ROUTER, "re:mtp.*"), experts=True, offset_norms=True),
    "Qwen3_5MoeForConditionalGeneration": Recipe(
        (*_QWEN3_5, *_ROUTER, *_BESIDE_TEXT), loader=_VISION_LOADER, experts=True, offset_norms=True
    ),
}
"""By the name in config.json's `architectures`. Each was converted and its output verified by the tests."""


def architecture(config: Mapping[str, Any]) -> str:
    """The model class that config.json names."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "(none)"


def of(config: Mapping[str, Any]) -> Recipe:
    """The recipe for the model that config.json describes.

    Raises:
        InputError: its architecture is not in the table, or it is quantized already.
    """
    name = architecture(config)
    if name not in RECIPES:
        raise InputError(
            f"model.repo: the model's architecture is {name}, and what must stay unquantized is known for "
            f"{', '.join(RECIPES)} only; take convert.scheme none, or add it to tasks/weights/recipes.py"
        )
    if "quantization_config" in config:
        raise InputError(
            "model.repo: the checkpoint is quantized already, and quantizing it twice ruins it: take "
            "convert.scheme none to serve it as it is, or name the unquantized repository"
        )
    return RECIPES[name]
