"""A slot whose server does not end: nothing else is started in it, and it is not called gone."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks.errors import Remedy
from tasks.node.processes import Process, this_process
from tasks.serving.launch import Slot
from tasks.serving.worker import Worker
from tasks.settings import Settings
from tests.runs import a_spec


class Hanging:
    """A server of which something stays in the kernel for as long as `left` says."""

    def __init__(self) -> None:
        self.left: list[Process] = [this_process()]
        self.graces: list[float] = []

    async def end(self, grace_s: float) -> list[Process]:
        self.graces.append(grace_s)
        return self.left


def a_worker(tmp_path: Path, hanging: Hanging) -> Worker:
    """Without ledger and client; its slot holds the server already."""
    job = SimpleNamespace(settings=Settings(home=tmp_path), serving=a_spec().serving, release_path=tmp_path)

    def record(write: Callable[..., None]) -> "asyncio.Future[None]":
        raise AssertionError("nothing is recorded before the first start")

    made = Worker(
        0,
        Slot("slot", "cpu", cores=(0,)),
        cast(Any, job),
        client=cast(Any, None),
        record=record,
        queries=None,
        turns=asyncio.Semaphore(1),
    )
    made._server = cast(Any, hanging)
    return made


def test_a_worker_that_does_not_end_is_not_gone_until_it_is(tmp_path: Path) -> None:
    hanging = Hanging()
    worker = a_worker(tmp_path, hanging)
    asyncio.run(worker.stop())
    assert not worker.is_gone
    assert worker.state == "suspect"
    assert f"process(es) {this_process().pid} of worker-0 do not end" in worker.message
    hanging.left = []
    asyncio.run(worker.stop())
    assert worker.is_gone


@pytest.mark.parametrize(("state", "grace_s"), [("ready", 10.0), ("starting", 1.0), ("suspect", 1.0)])
def test_only_a_worker_that_serves_is_given_time_to_end(tmp_path: Path, state: Any, grace_s: float) -> None:
    hanging = Hanging()
    worker = a_worker(tmp_path, hanging)
    worker.state = state
    asyncio.run(worker.stop())
    assert hanging.graces == [grace_s]


def test_nothing_is_started_in_a_slot_whose_last_server_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = a_worker(tmp_path, Hanging())

    async def start(*_: Any) -> None:
        raise AssertionError("a server is started beside the old one")

    monkeypatch.setattr(worker, "_start", start)
    asyncio.run(worker._serve_until_it_makes_no_sense())
    assert worker.given_up is not None
    assert (worker.given_up.kind, worker.given_up.remedy) == ("does not end", Remedy.OPERATOR)
    assert not worker.is_gone
