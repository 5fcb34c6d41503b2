"""What is asked of a worker and of a keeper, over HTTP."""

from dataclasses import dataclass
from typing import Any

import aiohttp

PROMPT = "Name a colour of the sky."
"""More than one token in every tokenizer: a prompt of one token kills vLLM's CPU engine on Qwen3.5."""

_HEALTH_TIMEOUT_S = 5.0


class NoAnswer(Exception):
    """The server did not answer as it should; the message says how instead."""


class Unfit(NoAnswer):
    """The server answers, and not as it should; it would do so again."""


class Refused(Unfit):
    """The server is well; the request was not to its liking."""


@dataclass(frozen=True)
class Load:
    """How much a worker has to do."""

    running: int
    waiting: int

    @property
    def idle(self) -> bool:
        """Whether no request is in it."""
        return self.running + self.waiting == 0


@dataclass(frozen=True)
class Look:
    """What an API server that answers says of itself."""

    load: Load
    tokens: int
    """Read and generated since it started: moves while its engine works."""


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


async def look(client: aiohttp.ClientSession, url: str) -> Look | None:
    """Health and metrics at once; None when it does not answer, or says that its engine is dead."""
    if not await is_healthy(client, url):
        return None
    try:
        async with client.get(f"{url}/metrics", timeout=_within(_HEALTH_TIMEOUT_S)) as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    load = Load(_total(text, "vllm:num_requests_running"), _total(text, "vllm:num_requests_waiting"))
    made = _total(text, "vllm:generation_tokens_total") + _total(text, "vllm:prompt_tokens_total")
    return Look(load, made)


def chat(model: str, max_tokens: int) -> dict[str, Any]:
    """The body of a short chat."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
    }


async def answer(
    client: aiohttp.ClientSession, url: str, model: str, *, max_tokens: int, timeout_s: float
) -> None:
    """A short chat, all the way through the engine.

    Raises:
        NoAnswer: it failed or took too long.
    """
    document = await post(client, f"{url}/v1/chat/completions", chat(model, max_tokens), timeout_s)
    if document["usage"]["prompt_tokens"] < 2:
        raise Unfit(
            f"a chat's prompt had {document['usage']['prompt_tokens']} token(s); it must have 2 or more"
        )


async def post(
    client: aiohttp.ClientSession, url: str, body: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    """One request to a worker's engine, and its answer.

    Raises:
        Refused: the worker is well and does not want this request.
        NoAnswer: it failed or took too long.
    """
    what = f"a request of {body['max_tokens']} token(s)"
    try:
        async with client.post(url, json=body, timeout=_within(timeout_s)) as response:
            if response.status != 200:
                said = (await response.text())[:300]
                kind = Refused if response.status in (400, 422) else NoAnswer
                raise kind(f"{what} was answered with status {response.status}: {said}")
            return dict(await response.json())
    except TimeoutError:
        raise NoAnswer(f"{what} was not answered within {timeout_s:.0f} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoAnswer(f"{what} was not answered: {type(error).__name__}: {error}") from None


async def refuses_strangers(url: str, timeout_s: float) -> None:
    """That the worker turns away who has no key.

    Raises:
        Unfit: it served a stranger.
        NoAnswer: it did not answer.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=_within(timeout_s)) as stranger,
            stranger.get(f"{url}/v1/models") as response,
        ):
            if response.status != 401:
                kind = Unfit if response.status < 400 else NoAnswer
                raise kind(f"a client without the key was answered with status {response.status}, not 401")
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


async def log_of(client: aiohttp.ClientSession, registry: str, worker_id: str, lines: int) -> str:
    """The newest lines of a worker's log, from its keeper.

    Raises:
        NoAnswer: see `pool`.
    """
    url = f"{registry}/v1/logs/{worker_id}?lines={lines}"
    try:
        async with client.get(url, timeout=_within(_HEALTH_TIMEOUT_S)) as response:
            if response.status != 200:
                raise NoAnswer(f"the registry answered with status {response.status}")
            return await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise NoAnswer(f"the registry does not answer: {type(error).__name__}") from None


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


def _total(text: str, name: str) -> int:
    """Sum over all label sets of a metric in Prometheus' text format."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith((name + "{", name + " ")):
            total += float(line.rsplit(" ", 1)[1])
    return int(total)
