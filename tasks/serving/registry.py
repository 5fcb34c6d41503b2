"""The registry: the keeper answers clients who is ready.

    GET /v1/pool -> {"pool_id", "model", "draining", "workers": [{"worker_id", "url", "state", "max_num_seqs",
                     "running", "waiting", "attempt", "message", "given_up"}]}

With the pool's key as a bearer token; 401 without. Clients poll it and send rows only to workers whose state
is `ready`. `POST /v1/pool/retry` tries the slots again that were given up, and answers the same document.

    GET /v1/logs/WORKER?lines=N -> text; WORKER is as above, or `keeper`
"""

import hmac
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

_LINES = 200
_MOST_LINES = 2000

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(
    listening: socket.socket,
    key: str,
    describe: Callable[[], dict[str, Any]],
    retry: Callable[[], None],
    tail: Callable[[str, int], list[str] | None],
) -> web.AppRunner:
    """Answer on the socket until the runner's `cleanup`."""

    async def get(request: web.Request) -> web.Response:
        return web.json_response(describe())

    async def post_retry(request: web.Request) -> web.Response:
        retry()
        return web.json_response(describe())

    async def get_log(request: web.Request) -> web.Response:
        asked = request.query.get("lines", "")
        lines = min(int(asked), _MOST_LINES) if asked.isdigit() else _LINES
        found = tail(request.match_info["worker"], lines)
        if found is None:
            return web.json_response({"error": "there is no such worker"}, status=404)
        return web.Response(text="\n".join(found))

    application = web.Application(middlewares=[_only_with(key)])
    application.router.add_get("/v1/pool", get)
    application.router.add_post("/v1/pool/retry", post_retry)
    application.router.add_get("/v1/logs/{worker}", get_log)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    return runner


def _only_with(key: str) -> Any:
    wanted = f"Bearer {key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, wanted):
            return web.json_response({"error": "the key of this pool is needed"}, status=401)
        return await handler(request)

    return check
