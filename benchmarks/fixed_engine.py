"""A stand-in for a vLLM worker and its keeper's registry: real HTTP, no model, a fixed capacity.

    python -m benchmarks.fixed_engine --capacity 64 --latency-s 0.05

Answers `capacity` chats at once, each after `latency_s` and `token_s` for each token that it may have, and lets the
others wait. It is lean (asyncio's protocols,
no HTTP library), so that a client's cost is seen and not the engine's. It counts what it is asked and when it
answered: the figures of a benchmark are its own, not the pipeline's. Prints its port, and ends with its input.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections import deque

_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')

_ANSWER = json.dumps(
    {
        "id": "chatcmpl-fixed",
        "object": "chat.completion",
        "model": "release-1",
        "system_fingerprint": "a stand-in, no model",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "An answer of some length, always the same. " * 5,
                },
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 60, "completion_tokens": 50, "total_tokens": 110},
    }
).encode()


def _response(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class FixedEngine:
    """What all connections share."""

    def __init__(self, capacity: int, latency_s: float, token_s: float) -> None:
        self.capacity = capacity
        self.latency_s = latency_s
        self.token_s = token_s
        self.running = 0
        self.waiting: deque[tuple[_Connection, float]] = deque()
        self.answer = _response(_ANSWER)
        self.port = 0
        self.reset(0)

    def reset(self, rows: int) -> None:
        """Begin to count anew; `rows` are to come."""
        self.rows = rows
        self.asked: set[int] = set()
        self.twice = 0
        self.answered = 0
        self.times: list[float] = []
        self.full_until = 0.0
        """When all places were taken for the last time."""
        self.worked_s = 0.0
        self.cpu_s = time.process_time()

    def ask(self, connection: "_Connection", body: bytes) -> None:
        """A chat came in."""
        before = len(self.asked)
        self.asked.add(hash(body))
        self.twice += len(self.asked) == before
        takes_s = self.latency_s + self._tokens_s(body)
        if not takes_s:
            self.finish(connection)
        elif self.running < self.capacity:
            self.start(connection, takes_s)
        else:
            self.waiting.append((connection, takes_s))

    def _tokens_s(self, body: bytes) -> float:
        found = _MAX_TOKENS.search(body) if self.token_s else None
        return self.token_s * int(found.group(1)) if found else 0.0

    def start(self, connection: "_Connection", takes_s: float) -> None:
        """It has a place."""
        self.running += 1
        self.worked_s += takes_s
        asyncio.get_running_loop().call_later(takes_s, self.end, connection)

    def end(self, connection: "_Connection") -> None:
        """Its time is over; the next one takes its place."""
        if self.running == self.capacity:
            self.full_until = time.monotonic()
        self.running -= 1
        if self.waiting:
            self.start(*self.waiting.popleft())
        self.finish(connection)

    def finish(self, connection: "_Connection") -> None:
        """Answer."""
        self.answered += 1
        self.times.append(time.monotonic())
        connection.answer(self.answer)

    def pool(self) -> bytes:
        """What a keeper's registry says."""
        worker = {
            "worker_id": "worker-0",
            "url": f"http://127.0.0.1:{self.port}",
            "state": "ready",
            "max_num_seqs": self.capacity,
            "running": self.running,
            "waiting": len(self.waiting),
        }
        return json.dumps(
            {"pool_id": "p", "model": "release-1", "draining": False, "workers": [worker]}
        ).encode()

    def report(self) -> bytes:
        """Rows a second over all and between 10% and 90% of the rows, and how many were asked for twice."""
        times = sorted(self.times)
        first, last = times[len(times) // 10], times[len(times) * 9 // 10]
        document = {
            "answered": self.answered,
            "asked_twice": self.twice,
            "rows_per_s": round(len(times) / (times[-1] - times[0]), 1),
            "steady_rows_per_s": round(0.8 * len(times) / (last - first), 1),
            "tail_s": round(times[-1] - self.full_until, 2) if self.full_until else None,
            "places_used": round(self.worked_s / self.capacity / (times[-1] - times[0]), 4),
            "engine_cpu_ms_per_row": round(1000 * (time.process_time() - self.cpu_s) / len(times), 4),
        }
        return json.dumps(document).encode()


class _Connection(asyncio.Protocol):
    def __init__(self, engine: FixedEngine) -> None:
        self._engine = engine
        self._data = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def answer(self, response: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(response)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end]
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            body = self._data[end + 4 : end + 4 + length]
            self._data = self._data[end + 4 + length :]
            self._route(head.split(b" ", 2)[1], body)

    def _route(self, path: bytes, body: bytes) -> None:
        if path == b"/v1/chat/completions":
            self._engine.ask(self, body)
        elif path == b"/v1/pool":
            self.answer(_response(self._engine.pool()))
        elif path == b"/report":
            self.answer(_response(self._engine.report()))
        else:
            self._engine.reset(0)
            self.answer(_response(b"{}"))


async def _serve(engine: FixedEngine) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(engine), "127.0.0.1", 0, backlog=4096)
    engine.port = server.sockets[0].getsockname()[1]
    print(engine.port, flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--capacity", type=int, default=64)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    options = parser.parse_args()
    asyncio.run(_serve(FixedEngine(options.capacity, options.latency_s, options.token_s)))
