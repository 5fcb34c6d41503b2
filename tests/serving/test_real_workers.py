"""Workers of the real vLLM on CPU: they serve, die in every way and are mended, and leave nothing behind.

Takes some ten minutes of two cores, so it runs when asked for: `REAL_WORKERS=1 pytest -s`. What is seen is printed.
The same with a stand-in for vLLM is in test_pool.py.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tasks.cli.status import status
from tasks.node.processes import Process
from tasks.serving import probes
from tests.serving.pool_world import World, status_of, wait_for
from tests.serving.real_world import ASKED_FOR, MODEL, is_ready, nothing_is_left, real_world, see, where_is

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(3600), ASKED_FOR]

_AIM_S = 10.0
"""For a stop, on a machine that has nothing else to do."""


def test_two_workers_serve_stop_come_back_and_end_without_their_keepers_help(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with real_world(tmp_path, database_url, monkeypatch, cores=(0, 1), prewarm_rounds=4) as world:
        told = [vars(_start(world, "two workers up, for the first time"))]
        keys = {"pool key": world.key()}
        _serve(world)
        secrets = {
            **keys,
            "deployment secret": world.settings.secret().decode(),
            "ledger password": urlsplit(database_url).password or "",
        }
        document, text = status(world.settings, "run-1")
        assert where_is(secrets, world, *told, document, text) == []
        told += [vars(_stop(world, "two workers stopped"))]

        told += [vars(_start(world, "two workers up again, warm"))]
        assert world.key() != keys["pool key"], "another pool, another key"
        secrets["second pool key"] = world.key()
        keeper = world.pool().keeper
        _kill(keeper, signal.SIGSTOP)
        told += [vars(_stop(world, "stopped while the keeper is stopped by a signal"))]
        places = where_is(secrets, world, *told)
        see("places with a secret in ps, files, ledger and XCom", places=places)
        assert places == []


def _start(world: World, what: str) -> object:
    began = time.monotonic()
    result = world.execute("start")
    see(what, seconds=round(time.monotonic() - began, 1), message=result.message)
    for row in world.rows(
        f"select worker_id, startup from pool_worker where pool_id = '{world.pool().pool_id}'"
    ):
        see(f"start of {row['worker_id']}", **row["startup"])
    return result


def _stop(world: World, what: str) -> object:
    processes = len(world.processes())
    began = time.monotonic()
    result = world.execute("stop")
    seconds = time.monotonic() - began
    nothing_is_left(world)
    see(what, seconds=round(seconds, 2), processes_before=processes, message=result.message)
    assert seconds < _AIM_S * max(1.0, os.getloadavg()[0] / 2)
    return result


def _serve(world: World) -> None:
    workers = world.registry()["workers"]
    key = world.key()
    for worker in workers:
        assert status_of(f"{worker['url']}/v1/models", key) == 200
        assert status_of(f"{worker['url']}/v1/models") == 401
    began = time.monotonic()
    statuses = [asyncio.run(_ask(worker["url"], key, how_many=8)) for worker in workers]
    see("eight chats to each", statuses=statuses, seconds=round(time.monotonic() - began, 1))
    assert statuses == [{200: 8}] * 2


def test_every_way_to_die_is_noticed_and_mended(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is killed several times in a row.
    with real_world(tmp_path, database_url, monkeypatch, cores=(0,), worker_attempts=9) as world:
        world.execute("start")
        for victim, number in (("server", 9), ("engine", 9), ("engine", signal.SIGSTOP)):
            _see_it_mended(world, victim, number)
        overload = asyncio.run(_ask(world.registry()["workers"][0]["url"], world.key(), how_many=30))
        see("thirty chats at once to four sequences", statuses=overload)
        assert set(overload) == {200, 503}

        _kill(world.engine(0), signal.SIGSTOP)
        wait_for("it is suspect", lambda: not is_ready(world), within_s=10)
        _stop(world, "stopped while the engine hangs")

        world.execute("start")
        keeper = world.pool().keeper
        _kill(keeper, signal.SIGKILL)
        wait_for("the server ended", lambda: not world.server(0).is_alive(), within_s=30)
        assert world.engine(0).is_alive(), "nobody has told it"
        _stop(world, "stopped after the keeper was killed")


def _see_it_mended(world: World, victim: str, number: int) -> None:
    process = world.server(0) if victim == "server" else world.engine(0)
    engine, url = world.engine(0), world.registry()["workers"][0]["url"]
    began = time.monotonic()
    _kill(process, number)
    wait_for("clients hear of it", lambda: not is_ready(world), within_s=10)
    heard_s = time.monotonic() - began
    health = status_of(f"{url}/health")
    wait_for("it is mended", lambda: is_ready(world), within_s=900)
    assert not engine.is_alive()
    evidence = world.rows(
        "select evidence from pool_worker_change where state in ('dead', 'suspect') order by change_id"
    )
    see(
        f"{victim} got signal {int(number)}",
        heard_s=round(heard_s, 2),
        health_said=health,
        mended_s=round(time.monotonic() - began, 1),
        evidence=[row["evidence"].splitlines()[0] for row in evidence][-2:],
    )
    assert heard_s < 2


def _kill(process: Process | None, number: int) -> None:
    assert process is not None
    os.kill(process.pid, number)


async def _ask(url: str, key: str, how_many: int) -> dict[int, int]:
    """Statuses of chats that are sent at once, and how many of each."""
    async with probes.session(key) as client:

        async def one() -> int:
            body = probes.chat(MODEL, 64)
            async with client.post(f"{url}/v1/chat/completions", json=body) as response:
                await response.read()
                return response.status

        return dict(Counter(await asyncio.gather(*(one() for _ in range(how_many)))))
