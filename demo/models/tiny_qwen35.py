"""A tiny Qwen3.5: the real architecture, trained here for about a minute.

    .envs/convert/bin/python -m demo.models.tiny_qwen35 OUT [SEED]

It exists so that the hybrid layers of Qwen3.5 (three of gated delta net, one of full attention), its
tokenizer and its chat form pass through the whole pipeline without a hub. It has learned from Python's own
documentation (demo/models/corpus.py): far from random, and of no use for anything else.

Keeps: the same bytes on the same machine (fixed seed, steps and threads; another kind of processor may
round differently); metrics.json holds no time of day and no duration.
"""

import json
import math
import os
import platform
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from demo import prompt_sources
from demo.models import qwen_rules
from demo.models.corpus import END, END_OF_TEXT, SPECIAL_TOKENS, Corpus, corpus
from demo.models.folder import build_once, sha256_of, write_json
from demo.models.muon import Muon

VOCABULARY = 2048
# All inputs of linear layers divide by 128, so that every group size of the converters fits; linear heads
# of 128 because vLLM's CPU kernels know no other size.
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
SEED = 35
STEPS = 160
BATCH = 4  # sequences a step
LENGTH = 128  # tokens a sequence
WARM_UP_STEPS = 20
MATRIX_RATE = 0.02
OTHER_RATE = 4e-3  # embeddings, norms, convolutions
THREADS = 2

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CARD = """\
---
license: other
license_name: psf-2.0
language: [en]
tags: [demo, qwen3_5]
---
# A tiny Qwen3.5

**What this is.** A model of the architecture Qwen3_5ForCausalLM with {parameters:,} parameters, trained for
about a minute by the demo of this project. It is not a model of the Qwen team and holds none of their
weights. Its answers look like Python's documentation and mean little.

**What it learned from.** Python's language reference (`pydoc_data.topics`) and docstrings of its standard
library, {training_tokens:,} tokens seen. Perplexity on texts held out: {held_out_perplexity:.1f}; a model
that knows only how frequent each token is has {unigram_perplexity:.0f}, one that knows nothing has
{uniform_perplexity}.

**Licence.** The texts are Python's, PSF-2.0.
"""


def build(out: Path, seed: int = SEED) -> bool:
    """Make the model at `out`; False when it is already there, whole.

    Args:
        seed: of its first weights and of the order in which it sees the texts.
    """
    here = Path(__file__)
    recipe = [here, *(here.with_name(name) for name in ("corpus.py", "muon.py", "qwen_rules.py"))]
    inputs = {
        "python": platform.python_version(),
        "seed": str(seed),
        **{package: version(package) for package in ("torch", "transformers", "tokenizers", "safetensors")},
        **{source.name: sha256_of(source) for source in [*recipe, Path(prompt_sources.__file__)]},
    }
    return build_once(out, inputs, partial(_write_model, seed=seed))


def _write_model(folder: Path, seed: int) -> None:
    # Threads that spin while they wait slow each other down when the machine has other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)

    texts = corpus()
    tokenizer = _train_tokenizer(texts)
    training, held_out = (
        torch.tensor([token for text in part for token in tokenizer.encode(text).ids])
        for part in (texts.training, texts.held_out)
    )
    model = _new_model(tokenizer)
    _train(model, training, seed)
    model.to(torch.bfloat16)  # measured as it is shipped
    metrics = {
        "held_out_perplexity": round(_perplexity(model, held_out), 2),
        "unigram_perplexity": round(_unigram_perplexity(training, held_out), 2),
        "uniform_perplexity": VOCABULARY,
        "held_out_tokens": len(held_out),
        "training_tokens": STEPS * BATCH * LENGTH,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    print(json.dumps(metrics), file=sys.stderr)
    model.save_pretrained(folder, max_shard_size="1500KB")  # two shards
    _write_tokenizer(tokenizer, folder)
    write_json(folder / "metrics.json", metrics)
    (folder / "README.md").write_text(CARD.format(**metrics), encoding="utf-8")


def _train_tokenizer(texts: Corpus) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    qwen_rules.apply_rules(tokenizer, qwen_rules.QWEN3_5)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts.training, trainer)
    return tokenizer


def _new_model(tokenizer: Any) -> Any:
    from transformers import GenerationConfig
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    ends = [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)]
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, eos_token_id=ends[0], pad_token_id=ends[1]))
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    return model


def _train(model: Any, tokens: Any, seed: int) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    matrices, others = _parameters(model)
    muon = Muon(matrices)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    chance = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(STEPS):
        share = min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - 0.95 * step / STEPS)
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=chance)
        batch = torch.stack([tokens[start : start + LENGTH + 1] for start in starts])
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(MATRIX_RATE * share)
        for group in adamw.param_groups:
            group["lr"] = OTHER_RATE * share
        adamw.step()
        model.zero_grad()
        if step % 40 == 0 or step == STEPS - 1:
            print(f"step {step + 1}/{STEPS}: loss {loss.item():.2f}", file=sys.stderr, flush=True)
    model.eval()


def _parameters(model: Any) -> tuple[list[Any], list[Any]]:
    """The matrices that Muon learns, and all others."""
    named = list(model.named_parameters())
    matrices = [value for name, value in named if _is_matrix(name, value)]
    return matrices, [value for name, value in named if not _is_matrix(name, value)]


def _is_matrix(name: str, value: Any) -> bool:
    return value.ndim == 2 and min(value.shape) > 1 and "embed" not in name


def _perplexity(model: Any, tokens: Any) -> float:
    """Over windows of LENGTH tokens, each predicted from those before it in its window."""
    import torch
    from torch.nn.functional import cross_entropy

    windows = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    with torch.inference_mode():
        losses = [
            cross_entropy(
                model(input_ids=part[:, :-1], use_cache=False).logits.float().flatten(0, 1),
                part[:, 1:].flatten(),
                reduction="sum",
            )
            for part in windows.split(16)
        ]
    return math.exp(sum(losses).item() / windows[:, 1:].numel())


def _unigram_perplexity(training: Any, held_out: Any) -> float:
    import torch

    counts = torch.bincount(training, minlength=VOCABULARY).double() + 1
    return math.exp(-(counts / counts.sum()).log()[held_out].mean().item())


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen3_5Tokenizer",
            "model_max_length": SHAPE["max_position_embeddings"],
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


if __name__ == "__main__":
    print(json.dumps({"model": sys.argv[1], "built": build(Path(sys.argv[1]), *map(int, sys.argv[2:3]))}))
