"""The pool with a stand-in for vLLM: everything that ends it, and what is left then."""

import os
import signal

import pytest

from tasks.errors import InputError, StageFailed
from tasks.ledger import take
from tasks.serving import pools, ports, stop
from tests.serving.forwarder import Forwarder
from tests.serving.pool_world import World, kill, wait_for


def test_stop_leaves_no_process_and_no_port(world: World) -> None:
    world.execute("start")
    urls = [worker["url"] for worker in world.registry()["workers"]]
    result = world.execute("stop")
    assert result.changed
    assert world.processes() == []
    assert ports.occupied([int(url.rsplit(":", 1)[1]) for url in urls]) == []
    assert pools.open_pool(world.ledger, "run-1") is None
    again = world.execute("stop")
    assert not again.changed
    assert "no pool is running" in again.message


@pytest.mark.parametrize("state", ["dead", "suspect"])
def test_a_port_of_a_dead_start_may_be_somebody_elses_by_now(
    world: World, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(stop, "_PORTS_WAIT_S", 2.0)
    world.execute("start")
    with ports.listen("", world.settings.port_range) as theirs:
        port = theirs.getsockname()[1]
        with world.ledger.transaction() as connection:
            connection.execute("select set_config('ledger.acting', 'test', true)")
            connection.execute(
                "insert into pool_worker (pool_id, worker_id, attempt, command, log, ports, state, evidence)"
                " values (%s, 'worker-0', 99, '[]', '', int4range(%s, %s), %s, '')",
                (world.pool().pool_id, port, port + 1, state),
            )
        if state == "dead":
            world.execute("stop")
        else:
            with pytest.raises(StageFailed, match=rf"port\(s\) {port} of the pool are still listened on"):
                world.execute("stop")
    world.execute("stop")
    assert pools.open_pool(world.ledger, "run-1") is None


def test_stop_lets_the_keeper_end_its_workers_itself(world: World) -> None:
    world.execute("start")
    world.execute("stop")
    log = (world.settings.logs / "run-1" / "keeper.log").read_text()
    assert "worker-1: stopped: nothing of it is left" in log
    assert "ended: " in log


@pytest.mark.parametrize("stage", ["start", "stop"])
def test_after_a_killed_keeper_the_next_stage_finds_what_it_left(world: World, stage: str) -> None:
    world.execute("start")
    keeper, before = world.pool().keeper, world.workers()
    kill(keeper)
    wait_for("the kernel ends the servers", lambda: not world.server(0).is_alive())
    assert any(process.is_alive() for process in before), "engines live on, as vLLM's do"
    assert world.execute(stage).changed
    assert not any(process.is_alive() for process in before)
    if stage == "start":
        assert {worker["state"] for worker in world.registry()["workers"]} == {"ready"}
    else:
        assert world.processes() == []


def test_a_keeper_that_hangs_is_replaced(world: World) -> None:
    world.configure(stop_grace_s=0.5, drain_s=0.5)
    world.execute("start")
    keeper = world.pool().keeper
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGSTOP)
    assert world.execute("start").changed
    assert not keeper.is_alive()
    assert {worker["state"] for worker in world.registry()["workers"]} == {"ready"}


@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_the_pool_ends_when_its_lease_does_with_the_database_gone(world: World, how: str) -> None:
    with Forwarder(world.url) as forwarder:
        (world.home / "ledger").write_text(forwarder.url)
        world.configure(lease_s=12.0, lease_renew_s=0.5, stop_grace_s=1.0)
        world.execute("start")
        keeper = world.pool().keeper
        assert keeper is not None
        forwarder.fail(how)
        wait_for("the pool ended", lambda: not world.processes(), within_s=60)
    log = (world.settings.logs / "run-1" / "keeper.log").read_text()
    assert "the lease expires and could not be renewed" in log
    (world.home / "ledger").write_text(world.url)
    assert world.execute("stop").changed, "the ledger did not know yet"


def test_the_keeper_renews_the_lease(world: World) -> None:
    world.configure(lease_s=2 * world.settings.lease_s, lease_renew_s=0.3)
    expiry = "select expires_at from lease"
    before = world.rows(expiry)[0]["expires_at"]
    world.execute("start")
    for _ in range(2):
        wait_for("a renewal", lambda: world.rows(expiry)[0]["expires_at"] > before)  # noqa: B023
        before = world.rows(expiry)[0]["expires_at"]


def test_a_keeper_whose_claim_was_taken_ends_its_pool(world: World) -> None:
    world.execute("start")
    take(world.ledger, "run-1", "keeper", frozenset({"keeper"}))
    wait_for("everything ended", lambda: not world.processes(), within_s=60)


def test_a_keeper_ends_its_pool_when_the_run_is_closed(world: World) -> None:
    from tasks.ledger import close

    world.execute("start")
    close(world.ledger, "run-1", "failed")
    wait_for("everything ended", lambda: not world.processes(), within_s=60)


@pytest.mark.parametrize("stage", ["start", "stop"])
def test_another_host_does_not_say_of_a_pool_that_it_cannot_see_that_it_is_stopped(
    world: World, stage: str
) -> None:
    world.execute("start")
    world.configure(node="dgx-9")
    with pytest.raises(InputError, match="the spec asks for 'local', and this host is 'dgx-9'"):
        world.execute(stage)
    assert pools.open_pool(world.ledger, "run-1") is not None
