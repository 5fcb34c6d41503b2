"""The pool's key at a worker's door: ASGI middleware that `vllm serve --middleware` loads in its API server.

Not vLLM's own VLLM_API_KEY. vLLM counts that variable among what compiled code depends on, so each pool, with
a key of its own, compiled the whole model again (17 to 20 s of a start that takes 50 s, on an H200 with vLLM
0.26.0), and wrote its key in plain text into the cache (cache_key_factors.json). Variables that do not begin
with VLLM_ are not counted.

Keeps: without the key nothing is answered but whether the server lives and its metrics. vLLM's own check
leaves everything outside /v1 open, tokenizing and pausing included.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "QWEN_POOL_KEY"
"""The variable that holds the pool's key."""

OPEN = frozenset({"/health", "/metrics"})

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Door:
    """Lets in who shows the key as a bearer token, and answers 401 to others."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        """
        Raises:
            RuntimeError: there is no key: a server that lets everybody in must not start.
        """
        key = os.environ.get(KEY)
        if not key:
            raise RuntimeError(f"{KEY} is not set, so nobody could be turned away")
        self._app = app
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """One connection."""
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or self._shows_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error":"the key of this pool is needed"}'})

    def _shows_key(self, scope: _Scope) -> bool:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._wanted)
