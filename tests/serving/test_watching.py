"""What is asked of a ready worker; the verdicts are in test_health.py."""

import asyncio
from typing import Any, cast

import pytest

from tasks.serving import probes, watching
from tasks.serving.probes import Load, Look

LOOK = Look(Load(1, 0), 7)


class Server:
    """Stopped by a signal once it has been looked at `hears` times."""

    def __init__(self, hears: int) -> None:
        self._hears = hears

    def is_stopped(self) -> bool:
        self._hears -= 1
        return self._hears < 0


def look(server: Server, answers_after_s: float, monkeypatch: pytest.MonkeyPatch) -> Look | None:
    """One look at a server whose answer takes so long; fails when it waits for that in vain."""

    async def slow(client: Any, url: str) -> Look:
        await asyncio.sleep(answers_after_s)
        return LOOK

    monkeypatch.setattr(probes, "look", slow)
    looking = watching._look(cast(Any, None), "http://worker", cast(Any, server), every_s=0.01)
    return asyncio.run(asyncio.wait_for(looking, timeout=30))


def test_a_server_that_is_stopped_while_it_is_asked_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert look(Server(hears=3), 3600, monkeypatch) is None


def test_a_server_that_runs_is_given_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(Server(hears=10**9), 0.05, monkeypatch) == LOOK
