"""A checkpoint's text model, with the weights of one layer in memory at a time. In the converting environment only."""

import math
from typing import Any

from tasks.weights.checkpoint import Checkpoint

_LOGITS_AT_ONCE = 128
"""Positions: with a vocabulary of 250,000 they take 0.13 GB a model."""

_LOSSES = 4

_OPENING_TOKENS = 128
"""Of the first sequence: what a server is asked about when it starts."""


class Streamed:
    """The text model that a base and its candidates share; computes in float32."""

    def __init__(self, base: Checkpoint) -> None:
        import transformers
        from accelerate import init_empty_weights

        config = transformers.AutoConfig.from_pretrained(base.folder, local_files_only=True)
        with init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(
                config.get_text_config(), trust_remote_code=False
            )
        self._body = model.model.float().eval()
        (embedding,) = (name for name in base.stored if name.endswith("embed_tokens.weight"))
        self._prefix = embedding.removesuffix("embed_tokens.weight")
        self._head = "lm_head.weight" if base.holds("lm_head.weight") else embedding

    def hidden_states(self, weights: Checkpoint, samples: Any) -> Any:
        """What the last norm gives for each token of each sample."""
        hooks = []
        for name in ("embed_tokens", "norm", *(f"layers.{index}" for index in range(len(self._body.layers)))):
            module = self._body.get_submodule(name)
            prefix = f"{self._prefix}{name}."
            hooks += [
                module.register_forward_pre_hook(
                    lambda module, _, prefix=prefix: _fill(module, prefix, weights)
                ),
                module.register_forward_hook(lambda module, *_: _empty(module)),
            ]
        try:
            return self._body(input_ids=samples, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()

    def compare(
        self, samples: Any, base: tuple[Checkpoint, Any], candidate: tuple[Checkpoint, Any]
    ) -> dict[str, Any]:
        """Perplexity of both, mean KL divergence in nats, how often both think the same token the likeliest; the
        candidate's nats a token in each of the first sequences, and in the beginning of the first.

        Args:
            base, candidate: weights, and the hidden states that they gave.
        """
        import torch

        targets = samples[:, 1:].reshape(-1)
        heads = [weights.values(self._head) for weights, _ in (base, candidate)]
        states = [found[:, :-1].reshape(len(targets), -1) for _, found in (base, candidate)]
        sums = torch.zeros(4, dtype=torch.float64)
        losses = []
        for begin in range(0, len(targets), _LOGITS_AT_ONCE):
            here = slice(begin, begin + _LOGITS_AT_ONCE)
            expected, found = (
                torch.nn.functional.linear(state[here], head).log_softmax(-1)
                for state, head in zip(states, heads, strict=True)
            )
            wanted = targets[here].unsqueeze(-1)
            parts = (
                -expected.gather(-1, wanted),
                -found.gather(-1, wanted),
                expected.exp() * (expected - found),
                expected.argmax(-1) == found.argmax(-1),
            )
            sums += torch.stack([part.sum(dtype=torch.float64) for part in parts])
            losses.append(parts[1].flatten())
        base_loss, loss, kl, same = (float(value) / len(targets) for value in sums)
        by_sequence = torch.cat(losses).reshape(len(samples), -1)
        opening = samples[0, :_OPENING_TOKENS]
        return {
            "base_perplexity": _perplexity(base_loss),
            "perplexity": _perplexity(loss),
            "kl": kl,
            "top1_agreement": same,
            "losses": by_sequence.mean(-1)[:_LOSSES].tolist(),
            "opening": opening.tolist(),
            "opening_loss": float(by_sequence[0, : len(opening) - 1].mean()),
        }


def _fill(module: Any, prefix: str, weights: Checkpoint) -> None:
    state = {name: _value(f"{prefix}{name}", weights) for name in module.state_dict()}
    module.load_state_dict(state, assign=True)


def _empty(module: Any) -> None:
    module.to("meta")


def _value(name: str, weights: Checkpoint) -> Any:
    """The parameter `name`; that of all experts is put together where the checkpoint has them one by one."""
    import torch

    if weights.holds(name):
        return weights.values(name)
    owner, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    experts: list[Any] = []
    while weights.holds(f"{owner}.{len(experts)}.{parts[0]}.weight"):
        found = [weights.values(f"{owner}.{len(experts)}.{part}.weight") for part in parts]
        experts.append(torch.cat(found))
    return torch.stack(experts)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
