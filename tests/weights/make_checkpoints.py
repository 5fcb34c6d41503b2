"""Make tiny checkpoints with random weights, one of each architecture that converting knows.

Run in the converting environment: `python make_checkpoints.py FOLDER` fills FOLDER/NAME for every name below.
Sizes are the smallest that a group of 64 divides; one layer of each kind is enough. Linear heads are of 128
because vLLM's CPU kernels know no other size.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NAMES = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_vl",
    "qwen3_5_moe",
    "qwen3_5_moe_vl",
)

_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"

_TEXT = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SHARED = {"shared_expert_intermediate_size": 64}

_TOKENS = {
    "image_token_id": 2,
    "video_token_id": 3,
    "vision_start_token_id": 4,
    "vision_end_token_id": 5,
}

_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
}

_WIDTHS = {
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("out_hidden_size", "head_dim"),
}


def make(folder: Path, names: Iterable[str] = NAMES, times: int = 1) -> None:
    """Write every checkpoint of `names` that is not there yet, its layers `times` as wide."""
    for name in names:
        target = folder / name
        if not target.exists():
            draft = folder / f".{name}"
            draft.mkdir(parents=True, exist_ok=True)
            _write(name, draft, times)
            draft.rename(target)


def write_wide(folder: Path, width: int, layers: int) -> None:
    """A Qwen2 whose layers, and not the libraries around it, take the memory."""
    import torch
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    config = transformers.Qwen2Config(**{**_TEXT, **size, **heads}, tie_word_embeddings=True)
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder)


def _write(name: str, folder: Path, times: int) -> None:
    import torch

    torch.manual_seed(0)
    model = _model(name, times).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="300KB")
    if name in ("qwen3_5", "qwen3_5_moe_vl"):
        _add_a_layer_that_no_class_loads(folder)
    _write_tokenizer(folder)


def _model(name: str, times: int) -> Any:
    import transformers as t

    text, experts, shared, vision = (_widened(shape, times) for shape in (_TEXT, _EXPERTS, _SHARED, _VISION))
    hybrid = {**text, **_DELTA_NET}
    hybrid_moe = {**hybrid, **experts, **shared}
    match name:
        case "qwen2":
            return t.Qwen2ForCausalLM(t.Qwen2Config(**text, tie_word_embeddings=True))
        case "qwen3":
            return t.Qwen3ForCausalLM(t.Qwen3Config(**text, tie_word_embeddings=False))
        case "qwen3_moe":
            return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**text, **experts))
        case "qwen3_5":
            return t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**hybrid, tie_word_embeddings=True))
        case "qwen3_5_moe":
            return t.Qwen3_5MoeForCausalLM(t.Qwen3_5MoeTextConfig(**hybrid_moe))
        case "qwen3_5_vl":
            config = t.Qwen3_5Config(text_config=hybrid, vision_config=vision, **_TOKENS)
            return t.Qwen3_5ForConditionalGeneration(config)
        case _:
            config = t.Qwen3_5MoeConfig(text_config=hybrid_moe, vision_config=vision, **_TOKENS)
            return t.Qwen3_5MoeForConditionalGeneration(config)


def _widened(shape: dict[str, Any], times: int) -> dict[str, Any]:
    return {name: size * times if name in _WIDTHS else size for name, size in shape.items()}


def _add_a_layer_that_no_class_loads(folder: Path) -> None:
    """As Qwen3.5 has one: it predicts the token after the next."""
    import torch
    from safetensors.torch import save_file

    tensors = {
        "mtp.layers.0.mlp.down_proj.weight": torch.randn(128, 192).to(torch.bfloat16),
        "mtp.layers.0.mlp.experts.down_proj": torch.randn(4, 128, 64).to(torch.bfloat16),
        "mtp.norm.weight": torch.randn(128).to(torch.bfloat16),
    }
    save_file(tensors, folder / "model-mtp.safetensors", {"format": "pt"})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "model-mtp.safetensors")
    path.write_text(json.dumps(index))


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_end|>", "<|image|>", "<|video|>", "<|im_start|>", "<|vision_end|>"]
    signs = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(signs)}, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **ends}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
