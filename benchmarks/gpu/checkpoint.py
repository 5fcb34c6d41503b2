"""A checkpoint of Qwen3.5-9B's architecture at real size, with random weights. Speed is real, text is not.

Needs torch and transformers; makes the weights on the GPU where there is one. The shape is transformers'
default for this architecture, which is the 9B's; what the published config adds and speed depends on (M-RoPE,
the recurrent state in float32) is written out below. The layers that predict several tokens ahead are left
out: the engine does not load them unless it is asked to.

The tokenizer is made up, byte-level BPE of the real vocabulary's size: a token for each syllable and each
pair of syllables, so that a text of any number of tokens can be written down.
"""

import json
import shutil
from itertools import islice, product
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit import Stopwatch

TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "vocab_size": 4096,
}
"""For a rehearsal on a CPU."""

_ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CONSONANTS = "bcdfghjklmnpqrstvwxzBCDFGHJKLMNPQRSTVWXZ"
_VOWELS = "aeiouyAEIOUY"

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make(folder: Path, tiny: bool = False) -> dict[str, Any]:
    """Write it; returns how long what took."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    watch = Stopwatch()
    shape = TINY if tiny else {}
    tokenizer = make_tokenizer(shape.get("vocab_size", 248_320))
    _write_tokenizer(tokenizer, folder)
    tokenizer_s = watch.lap_s()
    model = _make_model(shape, [tokenizer.token_to_id(sign) for sign in ("<|im_end|>", "<|endoftext|>")])
    made_s = watch.lap_s()
    parameters = sum(value.numel() for value in model.parameters())
    model.save_pretrained(folder, max_shard_size="4GB")
    written_s = watch.lap_s()
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {
        "parameters": parameters,
        "bytes": size,
        "tokenizer_s": tokenizer_s,
        "made_s": made_s,
        "written_s": written_s,
        "written_gb_per_s": round(size / written_s / 1e9, 3),
    }


def make_tokenizer(size: int) -> Any:
    """A byte-level BPE tokenizer with exactly `size` tokens, the special ones last.

    Merges are consonant + vowel and syllable + syllable, so a word of two syllables is one token whatever
    stands around it.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    from demo.models.qwen_rules import QWEN3_5, apply_rules

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = [first + second for first, second in product(_CONSONANTS, _VOWELS)]
    merges = [(syllable[0], syllable[1]) for syllable in syllables]
    room = size - len(SPECIAL) - len(alphabet)
    pairs = product(syllables, syllables)
    merges = merges[:room]
    merges += list(islice(pairs, room - len(merges)))
    longer = (
        (first + second, third) for first, second in product(syllables, syllables) for third in syllables
    )
    merges += list(islice(longer, room - len(merges)))
    tokens = [*alphabet, *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens([AddedToken(sign, special=True, normalized=False) for sign in SPECIAL])
    apply_rules(tokenizer, QWEN3_5)
    assert tokenizer.get_vocab_size() == size, tokenizer.get_vocab_size()
    return tokenizer


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen3_5Tokenizer",
            "model_max_length": 32_768,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    pixels = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    sizes = {"longest_edge": 16_777_216, "shortest_edge": 65_536}
    means = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    common = {"processor_class": "Qwen3VLProcessor", "size": sizes, **pixels, **means}
    _write_json(
        folder / "preprocessor_config.json", {**common, "image_processor_type": "Qwen2VLImageProcessorFast"}
    )
    _write_json(
        folder / "video_preprocessor_config.json",
        {**common, "video_processor_type": "Qwen3VLVideoProcessor"},
    )


def _make_model(shape: dict[str, Any], ends: list[int]) -> Any:
    import torch
    from transformers import GenerationConfig
    from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(35)
    text = {
        "rope_parameters": _ROPE,
        "mamba_ssm_dtype": "float32",
        "eos_token_id": ends[0],
        "pad_token_id": ends[1],
        **shape,
    }
    vision: dict[str, Any] = {"out_hidden_size": text.get("hidden_size", 4096)}
    if shape:
        vision |= {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3_5ForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    for name, value in model.named_parameters():
        if value.dtype is torch.float32 and value.ndim > 1:
            raise AssertionError(f"{name} is float32")
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    return model


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
