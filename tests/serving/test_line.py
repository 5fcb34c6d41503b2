"""The keeper's line over a ledger that ails; one that is gone is in test_pool_ends.py."""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg
import pytest

from tasks.ledger import leases, take
from tasks.serving import line
from tasks.serving.line import Line
from tests.serving.pool_world import World


@pytest.mark.parametrize(
    "trouble", [psycopg.errors.DiskFull("full"), psycopg.errors.ReadOnlySqlTransaction("read")]
)
def test_a_renewal_that_the_ledger_refuses_once_ends_no_pool(
    world: World, monkeypatch: pytest.MonkeyPatch, trouble: psycopg.Error
) -> None:
    refusals = iter([trouble])
    monkeypatch.setattr(line, "_RETRY_S", 0.0)
    monkeypatch.setattr(leases, "renew", _refusing(refusals, leases.renew))

    async def told() -> str:
        claim, _ = take(world.ledger, "run-1", "keeper", frozenset({"keeper"}))
        first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        own = Line(
            claim,
            world.lease().lease_id,
            world.settings,
            lambda _: first.set_result("renewed"),
            first.set_result,
        )
        own.open()
        try:
            return await asyncio.wait_for(first, 60)
        finally:
            await own.close("over", 10)

    assert asyncio.run(told()) == "renewed"
    assert next(refusals, None) is None


def _refusing(refusals: Any, renew: Callable[..., datetime]) -> Callable[..., datetime]:
    def refuse_or_renew(*arguments: Any) -> datetime:
        for trouble in refusals:
            raise trouble
        return renew(*arguments)

    return refuse_or_renew
