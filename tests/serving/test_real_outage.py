"""PostgreSQL is stopped while workers of the real vLLM serve, and nothing that started them lives any more.

`REAL_WORKERS=1` shortens the lease to three minutes; `REAL_WORKERS=long` is the real thing: the database is gone
for ten minutes and more, and the lease is as long as a deployment's. See test_real_workers.py.
"""

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.children import Children
from demo.postgres import Cluster
from tests.serving.pool_world import status_of, wait_for
from tests.serving.real_world import (
    ASKED_FOR,
    MODEL,
    nothing_is_left,
    real_world,
    see,
    start_in_a_process,
)
from tests.serving.traffic import Traffic

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(3600), ASKED_FOR]

LEASE_S = 900.0 if os.environ.get("REAL_WORKERS") == "long" else 180.0
RENEW_S = 5.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A server of the test's own, because it is stopped."""
    children = Children(tmp_path / "children", f"tests-{secrets.token_hex(4)}")
    made = Cluster(tmp_path / "cluster", children, settings={"fsync": "off"})
    made.start()
    yield made
    made.stop()


def test_workers_live_in_mid_batch_without_the_database_and_end_with_their_lease(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = {"lease_s": LEASE_S, "lease_renew_s": RENEW_S}
    with real_world(tmp_path, cluster.url("ledger"), monkeypatch, cores=(0, 1), **lease) as world:
        starting = start_in_a_process(world)
        assert starting.wait(timeout=1800) == 0, (world.home / "start.log").read_text()
        pool_registry, key = world.pool().registry, world.key()
        urls = [worker["url"] for worker in world.registry()["workers"]]
        with Traffic(urls, key, MODEL) as traffic:
            wait_for("answers", lambda: len(traffic.answered) > 4, within_s=60)
            world.ledger.close()
            cluster.stop()
            gone = time.monotonic()
            see("PostgreSQL is stopped in mid batch, and so is who started the pool", lease_s=LEASE_S)
            while time.monotonic() - gone < LEASE_S * 0.8:
                assert status_of(f"{pool_registry}/v1/pool", key) == 200
                time.sleep(5)
            see(
                "the workers serve on",
                gone_s=round(time.monotonic() - gone),
                answered=len(traffic.answered),
                failed=len(traffic.failed),
            )
            assert not traffic.failed
            assert time.monotonic() - traffic.answered[-1] < 30
            wait_for("all ended", lambda: not world.processes(), within_s=LEASE_S * 0.2 + 5)
            ended_s = time.monotonic() - gone
        see(
            "all ended by the keeper's clock",
            gone_s=round(ended_s, 1),
            answered=len(traffic.answered),
            last_answer_s=round(traffic.answered[-1] - gone, 1),
        )
        assert ended_s < LEASE_S
        cluster.start()
        assert world.execute("stop").changed, "the ledger did not know yet"
        nothing_is_left(world)
