"""How Qwen's tokenizers cut a text before they merge bytes.

Keeps: tokenizer.json says what AutoTokenizer does. transformers 5 takes only vocabulary and merges from the
tokenizer.json of a qwen2 or qwen3_5 model and the rules from its own code, whatever tokenizer_config.json
names (models/auto/tokenization_auto.py there). A tokenizer.json with other rules would count and cut one way
in the tokenizers library and another way in vLLM.
"""

from typing import Any

# models/qwen2/tokenization_qwen2.py and models/qwen3_5/tokenization_qwen3_5.py of transformers 5.17
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def apply_rules(tokenizer: Any, pieces: str) -> None:
    """Give a byte-level BPE `tokenizer` Qwen's normalization and its cutting into `pieces`."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
