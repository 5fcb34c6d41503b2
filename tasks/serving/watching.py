"""Look at a ready worker again and again: its API server, its tokens, its engine's processes, its memory.

What all that means is judged in `health`; here it is asked.
"""

import asyncio
from collections.abc import AsyncIterator

import aiohttp

from tasks.serving import device_memory, probes
from tasks.serving.health import Pulse, Verdict
from tasks.serving.line import now_s
from tasks.serving.probes import Look
from tasks.serving.server import Job, Server

_CANARY_TOKENS = 1
_MEMORY_EVERY = 10
"""Looks; the driver is asked, which may take a while."""


async def verdicts(
    client: aiohttp.ClientSession, url: str, job: Job, server: Server
) -> AsyncIterator[tuple[Verdict, Look | None]]:
    """One verdict for each look, the newest look beside it; never ends by itself."""
    settings = job.settings
    pulse = Pulse(settings.worker_silence_s, now_s())
    canary: asyncio.Task[None] | None = None
    looks = 0
    try:
        while True:
            look = await _look(client, url, server, settings.registry_poll_s)
            pulse.looked(look, now_s())
            ended, stopped = server.engines_gone()
            pulse.engines(ended, [*stopped, "its API server"] if server.is_stopped() else stopped)
            if looks % _MEMORY_EVERY == 0:
                pulse.memory(
                    await asyncio.to_thread(device_memory.missing, server.slot, server.memory_bytes, settings)
                )
            looks += 1
            if canary is not None and canary.done():
                _take(canary, pulse)
                canary = None
            if canary is None and look is not None and pulse.wants_canary(now_s()):
                canary = asyncio.create_task(
                    probes.answer(
                        client,
                        url,
                        job.release_id,
                        max_tokens=_CANARY_TOKENS,
                        timeout_s=settings.worker_silence_s,
                    )
                )
            yield pulse.verdict(now_s()), look
            await asyncio.sleep(settings.registry_poll_s)
    finally:
        if canary is not None:
            canary.cancel()
            await asyncio.gather(canary, return_exceptions=True)


async def _look(client: aiohttp.ClientSession, url: str, server: Server, every_s: float) -> Look | None:
    """None as soon as the API server is stopped by a signal, also when that happens while it is asked."""
    asking = asyncio.create_task(probes.look(client, url))
    try:
        while not server.is_stopped():
            answered, _ = await asyncio.wait({asking}, timeout=every_s)
            if answered:
                return asking.result()
        return None
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def _take(canary: "asyncio.Task[None]", pulse: Pulse) -> None:
    try:
        canary.result()
    except probes.NoAnswer as error:
        pulse.canary_failed(str(error))
    else:
        pulse.canary_answered(now_s())
