"""Who is let in to a worker's API server."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from tasks.serving.door import Door

Message = MutableMapping[str, Any]


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    monkeypatch.setenv("QWEN_POOL_KEY", "the key")

    async def app(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    return Door(app)


def answer(door: Door, path: str, *authorization: bytes, kind: str = "http") -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    headers = [(b"authorization", value) for value in authorization]
    asyncio.run(door({"type": kind, "path": path, "headers": headers}, receive, send))
    return sent


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/tokenize", "/pause", "/v1", "/", "//v1"]
)
def test_without_the_key_nothing_is_answered(door: Door, path: str) -> None:
    assert answer(door, path)[0]["status"] == 401
    assert answer(door, path, b"Bearer another key")[0]["status"] == 401
    assert answer(door, path, b"Bearer the key")[0]["status"] == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_whether_it_lives_is_told_to_anybody(door: Door, path: str) -> None:
    assert answer(door, path)[0]["status"] == 200


def test_two_keys_are_no_key(door: Door) -> None:
    assert answer(door, "/v1/models", b"Bearer wrong", b"Bearer the key")[0]["status"] == 401


def test_a_websocket_without_the_key_is_closed(door: Door) -> None:
    assert answer(door, "/v1/realtime", kind="websocket")[0]["type"] == "websocket.close"


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QWEN_POOL_KEY", raising=False)
    with pytest.raises(RuntimeError, match="QWEN_POOL_KEY"):
        Door(lambda scope, receive, send: asyncio.sleep(0))
