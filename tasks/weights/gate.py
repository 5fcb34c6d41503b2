"""The gate: whether what was converted is good enough to be published, and which candidate is.

Three limits, each on what the others do not see; see `measuring`. The defaults are by scheme, from what was
measured on sound conversions and on damaged ones (docs/weights.md). What must stay as it was is not measured
against a limit: it is as it was, or the candidate is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.errors import StageFailed
from tasks.spec.model import Gate

_NAMED = 5
"""Worst layers that a record and a message name."""

_SCALED_ERROR = 0.01
"""Of a norm or a router that awq scaled: bf16 rounds to 0.004."""

_DIGITS = 4
"""Of a recorded number: further ones differ between processors."""


@dataclass(frozen=True)
class Limits:
    """What a candidate may differ from its base by; see `tasks.spec.model.Gate`."""

    perplexity_ratio: float
    kl: float
    weight_error: float


DEFAULTS: Mapping[str, Limits] = {
    "fp8": Limits(perplexity_ratio=1.08, kl=0.05, weight_error=0.05),
    "fp8_block": Limits(perplexity_ratio=1.08, kl=0.05, weight_error=0.05),
    "awq": Limits(perplexity_ratio=1.5, kl=0.6, weight_error=0.25),
}
"""The worst that sound conversions showed (docs/weights.md, What was measured), and more than half of that again. It
was that of a model of 135 million parameters, whose rounding hurts most: fp8 1.031, 0.020 and 0.027; awq and plain
rounding 1.307, 0.327 and 0.130. A halved scale is an error of 0.5."""


@dataclass(frozen=True)
class Measured:
    """One candidate, as `measuring` reports it."""

    perplexity: float
    base_perplexity: float
    kl: float
    top1_agreement: float
    tokens: int
    losses: Sequence[float]
    """Nats a token, of the first few sequences."""
    opening: Sequence[int]
    """Token ids with which the first sequence begins."""
    opening_loss: float
    """Nats a token of them."""
    weight_errors: Mapping[str, float]
    """Of each quantized layer."""
    kept_errors: Mapping[str, float]
    """Of each tensor that is not quantized and not the base's bit for bit."""
    scaled: Sequence[str]
    """Those of them that awq scaled on purpose."""

    @property
    def worst_layers(self) -> list[tuple[str, float]]:
        """The layers with the largest errors, largest first."""
        return sorted(self.weight_errors.items(), key=lambda item: (-item[1], item[0]))[:_NAMED]

    def problems(self, limits: Limits) -> list[str]:
        """What is over its limit, each as a clause with its numbers."""
        found = []
        over = {name: error for name, error in self.weight_errors.items() if not error <= limits.weight_error}
        if over:
            worst = ", ".join(f"{name} ({error:.3f})" for name, error in self.worst_layers)
            found.append(f"{len(over)} layer(s) are off by more than {limits.weight_error}: {worst}")
        changed = {
            name: error
            for name, error in self.kept_errors.items()
            if name not in self.scaled or not error <= _SCALED_ERROR
        }
        if changed:
            names = ", ".join(sorted(changed, key=lambda name: (-changed[name], name))[:_NAMED])
            found.append(f"{len(changed)} tensor(s) should be as they were and are not: {names}")
        if not self.kl <= limits.kl:
            found.append(f"KL divergence is {self.kl:.4g} nats a token, over {limits.kl}")
        ratio = self.perplexity / self.base_perplexity
        if not ratio <= limits.perplexity_ratio:
            found.append(
                f"perplexity is {self.perplexity:.4g} where the base's is {self.base_perplexity:.4g}, over "
                f"{limits.perplexity_ratio} times"
            )
        return found

    def record(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "perplexity": _rounded(self.perplexity),
            "base_perplexity": _rounded(self.base_perplexity),
            "kl": _rounded(self.kl),
            "top1_agreement": _rounded(self.top1_agreement),
            "worst_layers": {name: _rounded(error) for name, error in self.worst_layers},
            "tokens": self.tokens,
        }

    def reading(self) -> dict[str, Any]:
        """For the manifest: what a server of the release must think of a few tokens, in nats each."""
        return {"tokens": list(self.opening), "nats": _rounded(self.opening_loss)}


def limits_of(scheme: str, asked: Gate) -> Limits:
    """The spec's limits, and the scheme's where it gives none."""
    default = DEFAULTS[scheme]
    return Limits(
        asked.max_perplexity_ratio or default.perplexity_ratio,
        asked.max_kl or default.kl,
        asked.max_weight_error or default.weight_error,
    )


def choose(measured: Mapping[str, Measured], limits: Limits) -> str:
    """The candidate to publish: of those that pass, the one with the smallest KL divergence.

    Raises:
        StageFailed: none passes; says of each by what, with the worst layers.
    """
    problems = {name: candidate.problems(limits) for name, candidate in measured.items()}
    passing = [name for name, found in problems.items() if not found]
    if not passing:
        why = "; ".join(f"{name}: {', and '.join(found)}" for name, found in problems.items())
        raise StageFailed(
            f"the conversion is not good enough and nothing was published. {why}. A limit that is too strict "
            f"for this model can be set in convert.gate; a layer that stands out alone was damaged"
        )
    return min(passing, key=lambda name: (measured[name].kl, name))


def recorded_problems(record: Mapping[str, Any], limits: Limits) -> list[str]:
    """What a published release's record is over, by the limits of a spec that came later."""
    if "kl" not in record:
        return []
    worst = {str(name): float(error) for name, error in record["worst_layers"].items()}
    known = {name: float(record[name]) for name in ("perplexity", "base_perplexity", "kl", "top1_agreement")}
    return Measured(
        **known,
        tokens=int(record["tokens"]),
        losses=(),
        opening=(),
        opening_loss=0.0,
        weight_errors=worst,
        kept_errors={},
        scaled=(),
    ).problems(limits)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
