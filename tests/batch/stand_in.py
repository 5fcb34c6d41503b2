"""A stand-in for a pool of workers: real HTTP, no model.

It speaks the keeper's registry and the chat completions of vLLM, answers with a text made from the prompt, runs
so many requests at once and lets the others wait, and misbehaves as it is told. It says what it is in each
answer's `system_fingerprint`. Every request is counted, so that a test knows what was generated twice without
asking the pipeline.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from types import TracebackType
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Does:
    """What a worker does with one request instead of answering at once."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """Instead of the answer."""
    after_s: float = 0.0
    closes: bool = False
    """Ends the connection in the middle of its answer."""
    answers_another: bool = False
    """Gives this answer the name of another request that is out."""
    at_the_door: bool = False
    """At once, without a place among those that the engine runs: as a full engine refuses."""
    finish_reason: str = "stop"
    text: str | None = None


Behaviour = Callable[[str, str, int], Does | None]
"""From worker, prompt and how often this prompt was asked for before, to what is done; None: an answer."""


def answer_to(prompt: str) -> str:
    """What every worker answers."""
    return f"stand-in answer {sha256(prompt.encode()).hexdigest()[:12]}"


class StandIn:
    """A pool in a thread of the test's process; `with StandIn(...) as pool:`"""

    def __init__(
        self,
        key: str,
        model: str = "release-1",
        workers: int = 2,
        max_num_seqs: int = 8,
        latency_s: float = 0.0,
        behaviour: Behaviour | None = None,
    ) -> None:
        self.key = key
        self.model = model
        self.max_num_seqs = max_num_seqs
        self.latency_s = latency_s
        self.behaviour = behaviour
        self.draining = False
        self.hidden: set[str] = set()
        """Workers that the registry does not name."""
        self.asked: Counter[str] = Counter()
        """Requests by prompt."""
        self.answered: Counter[str] = Counter()
        """Answers sent whole, by prompt."""
        self.by_worker: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.retries = 0
        """How often the keeper was told to try slots again."""
        self.finished_at: dict[str, float] = {}
        """When each prompt's last answer was sent, on the monotonic clock."""
        self.kv_cache_usage = 0.0
        self.turned_away = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.most_waiting = 0
        """Requests that an engine had and did not run, at most."""
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._out: dict[str, bool] = {}
        """Names of the requests that are out."""
        self.claimed_num_seqs: int | None = None
        """What the registry says, where that is not what the engine runs."""
        self.waiting_late = 0
        """The same when the first rows are done: once a client can know the engine."""
        self._at_once: Counter[str] = Counter()
        self._most_at_once: Counter[str] = Counter()
        self._names = [f"worker-{number}" for number in range(workers)]
        self._urls: dict[str, str] = {}
        self._stops: dict[str, Callable[[], Any]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stand-in", daemon=True)
        self.registry = ""

    def __enter__(self) -> "StandIn":
        self._thread.start()
        self.registry = self._call(self._serve("registry", 0, self._pool_app()))
        for name in self._names:
            self._urls[name] = self._call(self._serve(name, 0, self._worker_app(name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in list(self._stops):
            self.stop_worker(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stop_worker(self, name: str) -> None:
        """Close the worker's port and connections, answers in flight included."""
        self._call(self._stops.pop(name)())

    def start_worker(self, name: str) -> None:
        """Open it again on the same port."""
        port = int(self._urls[name].rsplit(":", 1)[1])
        self._call(self._serve(name, port, self._worker_app(name)))

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _serve(self, name: str, port: int, app: web.Application) -> str:
        runner = web.AppRunner(app, shutdown_timeout=0.0, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self._stops[name] = runner.cleanup
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def _pool_app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/pool", self._pool)
        app.router.add_post("/v1/pool/retry", self._retry)
        return app

    def _worker_app(self, name: str) -> web.Application:
        async def complete(request: web.Request) -> web.StreamResponse:
            return await self._complete(name, request)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", complete)
        return app

    def _has_key(self, request: web.Request) -> bool:
        if request.headers.get("Authorization") == f"Bearer {self.key}":
            return True
        self.turned_away += 1
        return False

    async def _pool(self, request: web.Request) -> web.Response:
        if not self._has_key(request):
            return web.json_response({"error": "the key is missing or wrong"}, status=401)
        workers = [
            {
                "worker_id": name,
                "url": url,
                "state": "starting" if name in self.hidden else "ready",
                "max_num_seqs": self.claimed_num_seqs or self.max_num_seqs,
                "running": self._running[name],
                "waiting": self._waiting[name],
                "kv_cache_usage": self.kv_cache_usage,
            }
            for name, url in self._urls.items()
        ]
        return web.json_response(
            {"pool_id": "pool-1", "model": self.model, "workers": workers, "draining": self.draining}
        )

    async def _retry(self, request: web.Request) -> web.Response:
        self.retries += 1
        return await self._pool(request)

    def most_at_once_of(self, *prompts: str) -> int:
        """How many of these requests were in flight with any other, at most."""
        return max(self._most_at_once[prompt] for prompt in prompts)

    async def _complete(self, worker: str, request: web.Request) -> web.StreamResponse:
        if not self._has_key(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = json.loads(await request.read())
        if body["model"] != self.model:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        prompt = body["messages"][-1]["content"]
        before = self.asked[prompt]
        self.asked[prompt] += 1
        self.by_worker[worker] += 1
        self.bodies.append(body)
        name = request.headers.get("X-Request-Id", "")
        self._out[name] = True
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        for running in list(self._at_once):
            self._most_at_once[running] = max(self._most_at_once[running], self.in_flight)
        self._at_once[prompt] += 1
        # Of the last time that it was asked.
        self._most_at_once[prompt] = self.in_flight
        try:
            does = (self.behaviour and self.behaviour(worker, prompt, before)) or Does()
            if does.at_the_door:
                return await self._respond(does, prompt, request)
            slots = self._slots.setdefault(worker, asyncio.Semaphore(self.max_num_seqs))
            self._waiting[worker] += 1
            self.most_waiting = max(self.most_waiting, self._waiting[worker])
            try:
                await slots.acquire()
            finally:
                self._waiting[worker] -= 1
            self._running[worker] += 1
            if 150 < sum(self.answered.values()) < 300:
                self.waiting_late = max(self.waiting_late, self._waiting[worker])
            try:
                await asyncio.sleep(does.after_s or self.latency_s)
                return await self._respond(does, prompt, request)
            finally:
                self._running[worker] -= 1
                slots.release()
        finally:
            self.in_flight -= 1
            self._out.pop(name, None)
            self._at_once[prompt] -= 1
            self._at_once += Counter()

    def _name_of(self, request: web.Request, does: Does) -> str:
        """The request's own name, as vLLM repeats it."""
        own = request.headers.get("X-Request-Id", "stand-in")
        return next(name for name in self._out if name != own) if does.answers_another else own

    async def _respond(self, does: Does, prompt: str, request: web.Request) -> web.StreamResponse:
        text = does.text if does.text is not None else answer_to(prompt)
        content = (
            does.body
            if does.body is not None
            else json.dumps(
                {
                    "id": f"chatcmpl-{self._name_of(request, does)}",
                    "object": "chat.completion",
                    "model": self.model,
                    "system_fingerprint": "a stand-in, no model",
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": text},
                            "finish_reason": does.finish_reason,
                        }
                    ],
                    "usage": {
                        "prompt_tokens": len(prompt.split()) + 2,
                        "completion_tokens": len(text.split()),
                    },
                }
            ).encode()
        )
        if does.closes:
            response = web.StreamResponse(headers={"Content-Length": str(len(content))})
            await response.prepare(request)
            await response.write(content[: len(content) // 2])
            assert request.transport is not None
            request.transport.abort()
            return response
        if does.status == 200:
            self.finished_at[prompt] = time.monotonic()
            self.answered[prompt] += 1
        return web.Response(
            status=does.status, body=content, headers=does.headers, content_type="application/json"
        )
