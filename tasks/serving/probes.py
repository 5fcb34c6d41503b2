"""What is asked of a worker and of a keeper, over HTTP."""

from dataclasses import dataclass
from typing import Any

import aiohttp

PROMPT = "Name a colour of the sky."
"""More than one token in every tokenizer: a prompt of one token kills vLLM's CPU engine on Qwen3.5."""

_HEALTH_TIMEOUT_S = 5.0


class NoAnswer(Exception):
    """The server did not answer as it should; the message says how instead."""


@dataclass(frozen=True)
class Load:
    """How much a worker has to do."""

    running: int
    waiting: int

    @property
    def idle(self) -> bool:
        """Whether no request is in it."""
        return self.running + self.waiting == 0


def session(key: str) -> aiohttp.ClientSession:
    """A client that shows the pool's key; without a total limit, each call has its own."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=None)
    )


async def is_healthy(client: aiohttp.ClientSession, url: str) -> bool:
    """Whether the API server says that its engine lives."""
    try:
        async with client.get(f"{url}/health", timeout=_within(_HEALTH_TIMEOUT_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def load(client: aiohttp.ClientSession, url: str) -> Load | None:
    """From the worker's metrics; None when it does not answer."""
    try:
        async with client.get(f"{url}/metrics", timeout=_within(_HEALTH_TIMEOUT_S)) as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    return Load(_gauge(text, "vllm:num_requests_running"), _gauge(text, "vllm:num_requests_waiting"))


async def answer(
    client: aiohttp.ClientSession, url: str, model: str, *, max_tokens: int, timeout_s: float
) -> None:
    """A short chat, all the way through the engine.

    Raises:
        NoAnswer: it failed or took too long.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
    }
    try:
        async with client.post(
            f"{url}/v1/chat/completions", json=body, timeout=_within(timeout_s)
        ) as response:
            if response.status != 200:
                said = (await response.text())[:300]
                raise NoAnswer(f"a chat was answered with status {response.status}: {said}")
            document = await response.json()
    except TimeoutError:
        raise NoAnswer(f"a chat of {max_tokens} tokens was not answered within {timeout_s:.0f} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoAnswer(f"a chat was not answered: {type(error).__name__}: {error}") from None
    if document["usage"]["prompt_tokens"] < 2:
        raise NoAnswer(
            f"a chat's prompt had {document['usage']['prompt_tokens']} token(s); it must have 2 or more"
        )


async def refuses_strangers(url: str, timeout_s: float) -> None:
    """That the worker turns away who has no key.

    Raises:
        NoAnswer: it served a stranger, or did not answer.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=_within(timeout_s)) as stranger,
            stranger.get(f"{url}/v1/models") as response,
        ):
            if response.status != 401:
                raise NoAnswer(
                    f"a client without the key was answered with status {response.status}, not 401"
                )
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise NoAnswer(f"a client without the key got no answer: {type(error).__name__}") from None


async def pool(client: aiohttp.ClientSession, registry: str, pool_id: str) -> dict[str, Any]:
    """What the keeper says of its pool; see `registry`.

    Raises:
        NoAnswer: nobody answers there, or somebody else's keeper does.
    """
    return await _registry(client.get(f"{registry}/v1/pool", timeout=_within(_HEALTH_TIMEOUT_S)), pool_id)


async def retry(client: aiohttp.ClientSession, registry: str, pool_id: str) -> dict[str, Any]:
    """Ask the keeper to try the slots again that it gave up.

    Raises:
        NoAnswer: see `pool`.
    """
    return await _registry(
        client.post(f"{registry}/v1/pool/retry", timeout=_within(_HEALTH_TIMEOUT_S)), pool_id
    )


async def _registry(request: Any, pool_id: str) -> dict[str, Any]:
    try:
        async with request as response:
            if response.status != 200:
                raise NoAnswer(f"the registry answered with status {response.status}")
            document = await response.json()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise NoAnswer(f"the registry does not answer: {type(error).__name__}") from None
    if document.get("pool_id") != pool_id:
        raise NoAnswer(f"the registry is that of pool {document.get('pool_id')}")
    return dict(document)


def _within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


def _gauge(text: str, name: str) -> int:
    """Sum over all label sets of a gauge in Prometheus' text format."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith((name + "{", name + " ")):
            total += float(line.rsplit(" ", 1)[1])
    return int(total)
