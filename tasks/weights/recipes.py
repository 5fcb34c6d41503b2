"""What is quantized and what is not, by architecture.

`ignored` are regular expressions over module names, in the form llm-compressor takes (`re:` first). What the
lists keep in full precision and why:

- lm_head and embeddings: every token passes them, and they are a small part of a large model.
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
_DELTA_NET = (r"re:.*linear_attn\.in_proj_[ab]$", r"re:.*linear_attn\.conv1d$")
_BESIDE_TEXT = ("re:.*visual.*", "re:mtp.*")


@dataclass(frozen=True)
class Recipe:
    """How one architecture is converted."""

    ignored: tuple[str, ...]
    """Modules that stay as they are."""
    loader: str = "AutoModelForCausalLM"
    """The class of transformers that loads the whole checkpoint, for schemes that need the model itself."""

    def quantizes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the tensor `name` is a matrix that this recipe quantizes."""
        module, _, kind = name.rpartition(".")
        if kind != "weight" or len(shape) != 2 or module.endswith("norm"):
            return False
        return not any(re.match(pattern.removeprefix("re:"), module) for pattern in self.ignored)


RECIPES: Mapping[str, Recipe] = {
    "Qwen2ForCausalLM": Recipe(_HEADS),
    "Qwen3ForCausalLM": Recipe(_HEADS),
    "Qwen3_5ForCausalLM": Recipe((*_HEADS, *_DELTA_NET, "re:mtp.*")),
    "Qwen3_5ForConditionalGeneration": Recipe(
        (*_HEADS, *_DELTA_NET, *_BESIDE_TEXT), loader="AutoModelForImageTextToText"
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
