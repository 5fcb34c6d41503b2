"""The first requests of a worker: the shapes that the batch will bring, until they are no longer slow.

On a GPU kernels are compiled when a shape is first met: the first batch of a 9B model ran at half speed. So rounds
of requests are sent, each as many at once as the engine decodes, until a round is hardly faster than the one
before it. What they were and how long they took goes to the ledger. On a CPU vLLM compiles nothing (its workers
run eagerly), and a round takes as long as so many rows of the batch.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tasks.serving import probes
from tasks.serving.launch import Slot
from tasks.serving.line import now_s
from tasks.settings import Settings
from tasks.spec import RunSpec

_ANSWER_TOKENS = 16
_SHORT_TOKENS = 8
"""Never 1: a prompt of one token kills vLLM's CPU engine on Qwen3.5."""
_PREFILL_STEPS = 8
"""Full engine steps of prefill in a round; what is over is filled with short prompts."""
_HARDLY_FASTER = 0.85
_MIN_ROUNDS = 2
_ROUNDS_ON_GPUS = 5
_WORD_IDS = range(10, 1000)
"""Of tokens that prompts are made of, cut to the vocabulary; which words they are does not matter."""


@dataclass(frozen=True)
class Shapes:
    """What one round of requests is made of."""

    usual_tokens: int
    """Of a prompt of the batch, on average."""
    longest_tokens: int
    answer_tokens: int
    sequences: int
    """At once."""
    usual_prompts: int
    """How many of them are of the usual length."""
    schema: dict[str, Any] | None

    def prompts(self) -> list[int]:
        """Length of each prompt of a round, the longest first."""
        usual = [self.usual_tokens] * max(0, min(self.usual_prompts, self.sequences - 1))
        short = [_SHORT_TOKENS] * (self.sequences - 1 - len(usual))
        return [self.longest_tokens, *usual, *short]


@dataclass(frozen=True)
class Round:
    """One round that was answered."""

    requests: int
    prompt_tokens: int
    seconds: float


def shapes_of(spec: RunSpec, prepared: Mapping[str, Any]) -> Shapes:
    """From the spec and what `prepare` counted; where it counted nothing, a guess from max_model_len."""
    serving = spec.serving
    answer = min(_ANSWER_TOKENS, spec.batch.sampling.max_tokens, serving.max_model_len // 2)
    room = serving.max_model_len - answer - 1
    rows, total = prepared.get("rows") or 0, prepared.get("prompt_tokens") or 0
    usual = total // rows if rows and total else room // 4
    longest = prepared.get("longest_prompt_tokens") or room
    usual, longest = (max(2, min(tokens, room)) for tokens in (usual, longest))
    budget = _PREFILL_STEPS * serving.max_num_batched_tokens - longest
    return Shapes(
        usual, longest, answer, serving.sequences, max(1, budget // usual), spec.batch.answer_schema
    )


def most_rounds(slot: Slot, settings: Settings) -> int:
    """How many rounds at most are sent to a worker in that slot."""
    if settings.prewarm_rounds is not None:
        return settings.prewarm_rounds
    return 0 if slot.kind == "cpu" else _ROUNDS_ON_GPUS


async def warm(
    client: aiohttp.ClientSession,
    url: str,
    model: str,
    release: Path,
    shapes: Shapes,
    settings: Settings,
    rounds_at_most: int,
) -> dict[str, Any]:
    """Send rounds until they are stable; returns the report.

    Raises:
        probes.NoAnswer: a request failed, or took too long.
    """
    began = now_s()
    vocabulary = _vocabulary(release)
    structured = await _structured(client, url, model, shapes, settings)
    rounds: list[Round] = []
    stable = False
    while len(rounds) < rounds_at_most and now_s() - began < settings.prewarm_s:
        lengths = shapes.prompts()
        started = now_s()
        await asyncio.gather(
            *(_complete(client, url, model, length, vocabulary, shapes, settings) for length in lengths)
        )
        rounds.append(Round(len(lengths), sum(lengths), round(now_s() - started, 3)))
        if len(rounds) >= _MIN_ROUNDS and rounds[-1].seconds >= rounds[-2].seconds * _HARDLY_FASTER:
            stable = True
            break
    return {
        "shapes": {name: value for name, value in asdict(shapes).items() if name != "schema"},
        "structured": structured,
        "rounds": [asdict(one) for one in rounds],
        "stable": stable,
        "seconds": round(now_s() - began, 3),
    }


def summary(report: Mapping[str, Any]) -> str:
    """The report in a few words, as evidence."""
    seconds = [f"{one['seconds']:.2f}" for one in report["rounds"]]
    if not seconds:
        return "a chat was answered"
    requests, state = report["rounds"][0]["requests"], "stable" if report["stable"] else "not stable yet"
    return f"{len(seconds)} round(s) of {requests} request(s) took {', '.join(seconds)} s: {state}"


async def _complete(
    client: aiohttp.ClientSession,
    url: str,
    model: str,
    length: int,
    vocabulary: int,
    shapes: Shapes,
    settings: Settings,
) -> None:
    # New ones each time: a prompt that is known already is not prefilled again.
    tokens = random.choices(_WORD_IDS[: max(2, vocabulary - _WORD_IDS.start)], k=length)
    body = {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": shapes.answer_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    await probes.post(client, f"{url}/v1/completions", body, settings.canary_timeout_s)


async def _structured(
    client: aiohttp.ClientSession, url: str, model: str, shapes: Shapes, settings: Settings
) -> str:
    """One chat with the batch's schema: its grammar is compiled before the rows come. Says how it went."""
    if shapes.schema is None:
        return "no schema"
    named = {"name": "answer", "schema": shapes.schema, "strict": True}
    body = {
        **probes.chat(model, shapes.answer_tokens),
        "response_format": {"type": "json_schema", "json_schema": named},
    }
    try:
        await probes.post(client, f"{url}/v1/chat/completions", body, settings.canary_timeout_s)
    except probes.Refused as error:
        # The rows will be told the same, each with its own typed error; the worker is well.
        return f"refused: {error}"
    return "answered"


def _vocabulary(release: Path) -> int:
    try:
        config = json.loads((release / "config.json").read_text())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return _WORD_IDS.stop
