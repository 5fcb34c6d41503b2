"""How a pool stands: asked of its keeper and, because that may not know yet, of the workers themselves."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from tasks.serving import probes
from tasks.serving.pools import Pool

_PAUSE_S = 0.25
_CANARY_TOKENS = 1


@dataclass(frozen=True)
class Standing:
    """A pool at one moment."""

    workers: tuple[dict[str, Any], ...]
    """As the registry describes them."""
    unready: tuple[str, ...]
    """Workers that are not ready, by the keeper's word or because they do not answer."""
    draining: bool


def ask(pool: Pool, key: str, *, tries: int) -> Standing:
    """How the pool stands now. A keeper that is slow for a moment is asked again.

    Raises:
        NoAnswer: the keeper does not answer, or has ended.
    """
    for number in range(1, tries + 1):
        try:
            return asyncio.run(_ask(pool, key))
        except probes.NoAnswer:
            if number == tries or (pool.keeper is not None and not pool.keeper.is_alive()):
                raise
            time.sleep(_PAUSE_S)
    raise AssertionError("the loop returns or raises")


def try_again(pool: Pool, key: str) -> None:
    """Have the keeper try the slots again that it gave up.

    Raises:
        NoAnswer: see `ask`.
    """

    async def retry() -> None:
        async with probes.session(key) as client:
            await probes.retry(client, _registry(pool), pool.pool_id)

    asyncio.run(retry())


def prove(pool: Pool, key: str, timeout_s: float) -> int:
    """That every worker answers a chat with the key and turns away who has none; returns their number.

    Workers whose slot was given up are left out; that enough are left is the keeper's concern.

    Raises:
        Unfit: names a worker that answers, and never as it should.
        NoAnswer: names a worker, and what it does instead.
    """
    return asyncio.run(_prove(pool, key, timeout_s))


async def _ask(pool: Pool, key: str) -> Standing:
    async with probes.session(key) as client:
        document = await probes.pool(client, _registry(pool), pool.pool_id)
        workers = document["workers"]
        serve = await asyncio.gather(*(_serves(client, worker) for worker in workers))
    unready = [worker["worker_id"] for worker, ready in zip(workers, serve, strict=True) if not ready]
    return Standing(tuple(workers), tuple(unready), document["draining"])


async def _serves(client: aiohttp.ClientSession, worker: dict[str, Any]) -> bool:
    return worker["state"] == "ready" and await probes.is_healthy(client, worker["url"])


async def _prove(pool: Pool, key: str, timeout_s: float) -> int:
    async def one(worker: dict[str, Any]) -> None:
        url, model = worker["url"], pool.wanted.release_id
        try:
            if worker["state"] != "ready":
                raise probes.NoAnswer(f"it is {worker['state']}: {worker['message']}")
            await probes.refuses_strangers(url, timeout_s)
            await probes.answer(client, url, model, max_tokens=_CANARY_TOKENS, timeout_s=timeout_s)
        except probes.NoAnswer as error:
            raise type(error)(f"{worker['worker_id']}: {error}") from None

    async with probes.session(key) as client:
        document = await probes.pool(client, _registry(pool), pool.pool_id)
        workers = [worker for worker in document["workers"] if not worker["given_up"]]
        await asyncio.gather(*(one(worker) for worker in workers))
    return len(workers)


def _registry(pool: Pool) -> str:
    if pool.registry is None:
        raise probes.NoAnswer("the keeper has not said yet where its registry is")
    return pool.registry
