"""Whether a worker reads the release's weights as they were measured when the release was made.

The manifest holds the beginning of a held-out text and how surprising each of its tokens is, in nats. A server that
takes the format for another one answers as readily, and nonsense: only numbers tell. So a release that no engine had
loaded before it was published is proven by the first workers that serve it, and each later worker by the same.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from tasks.serving import probes
from tasks.settings import Settings

_TOLERANCE_NATS = 0.3
"""A token, of a hundred: kernels round activations and caches. Weights that are misread are off by whole nats."""

_MANIFEST = "manifest.json"
"""The release's, see `tasks.weights.store`."""


class Misread(Exception):
    """It thinks of the text what nobody would who reads the weights as they are meant; says the numbers."""


async def prove(
    client: aiohttp.ClientSession, url: str, model: str, release: Path, settings: Settings
) -> str:
    """Ask the worker what it thinks of the text; returns what was found, for its report.

    Raises:
        Misread: it thinks otherwise.
        probes.NoAnswer: it did not answer.
    """
    expected = _expected(release)
    if expected is None:
        return "nothing was measured"  # as downloaded, or made before such texts were kept
    body = {
        "model": model,
        "prompt": expected["tokens"],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }
    try:
        answer = await probes.post(client, f"{url}/v1/completions", body, settings.canary_timeout_s)
    except probes.Refused as error:  # as where max_model_len is shorter than the text
        return f"refused: {error}"
    found = _nats(answer, expected["tokens"])
    if found is None:
        return "the server tells no probabilities of a prompt"
    if not abs(found - expected["nats"]) <= _TOLERANCE_NATS:
        raise Misread(
            f"reads {model} differently than it is meant: {found:.3f} nats a token of held-out text where "
            f"{expected['nats']:.3f} were measured when it was made. Its answers would be worthless; this vLLM and "
            f"the release's format do not go together: take another convert.scheme, or another vLLM"
        )
    return f"{found:.3f} nats a token, measured were {expected['nats']:.3f}"


def _expected(release: Path) -> Mapping[str, Any] | None:
    try:
        reading = json.loads((release / _MANIFEST).read_text()).get("reading")
    except (OSError, ValueError, AttributeError):
        return None
    return reading if isinstance(reading, dict) else None


def _nats(answer: Mapping[str, Any], tokens: list[int]) -> float | None:
    """Mean over all tokens but the first, which nothing comes before; None where the server told nothing."""
    told = answer["choices"][0].get("prompt_logprobs")
    if not told:
        return None
    try:
        surprises = [
            -float(at[str(token)]["logprob"]) for token, at in zip(tokens[1:], told[1:], strict=True)
        ]
    except (ValueError, KeyError, TypeError):
        return math.nan
    return sum(surprises) / len(surprises)
