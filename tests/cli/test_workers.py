"""What a person and a service manager are told of workers. The workers are stand-ins."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.cli import main
from tasks.ledger import take
from tasks.node import processes
from tests.serving.pool_world import World, make_world, wait_for


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A run with one CPU slot that has come as far as provision."""
    made = make_world(tmp_path, database_url, monkeypatch)
    made.add_run("run-1", cores=(0,))
    try:
        yield made
    finally:
        made.close()


def test_the_probe_fails_exactly_when_the_node_is_not_as_the_ledger_says(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--probe"]) == 0, "no pool is fine"
    world.execute("start")
    capsys.readouterr()
    assert main(["status", "--probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers_ready"] == 1

    engine = world.engine(0)
    os.kill(engine.pid, signal.SIGSTOP)
    wait_for("suspect", lambda: world.registry()["workers"][0]["state"] == "suspect")
    assert main(["status", "--probe"]) == 4
    assert "worker-0 is suspect: stopped by a signal" in capsys.readouterr().err
    os.kill(engine.pid, signal.SIGCONT)

    keeper = world.pool().keeper
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGKILL)
    wait_for("its end", lambda: not keeper.is_alive())
    assert main(["status", "--probe"]) == 4
    assert "its keeper is dead" in capsys.readouterr().err
    world.execute("stop")
    assert main(["status", "--probe"]) == 0


def test_the_probe_tells_of_leases_that_are_over_and_of_strays(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    claim, _ = take(world.ledger, "run-1", "test", frozenset({"test"}))
    with claim.writing() as connection:
        connection.execute("update lease set expires_at = now() - interval '1 second'")
    stray = processes.spawn(
        ["sleep", "600"], processes.environment("run-9/worker-0"), world.home / "log", outlives_parent=True
    )
    assert main(["status", "--probe"]) == 4
    said = capsys.readouterr().err
    assert "2 problem(s)" in said
    assert "lease 1 of run run-1 is over" in said
    assert "processes of run run-9 live" in said
    stray.kill()
    stray.wait()
    world.configure(ledger_url_file=str(world.home / "none"))
    assert main(["status", "--probe"]) == 2


def test_status_shows_workers_and_their_logs_also_when_the_pool_has_ended(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--run", "run-1", "--log", "worker-0"]) == 2
    assert "it has no pool yet" in capsys.readouterr().err
    world.execute("start")
    key = world.key()
    for state in ("ready", "stopped"):
        capsys.readouterr()
        assert main(["status", "--run", "run-1"]) == 0
        said = capsys.readouterr().out
        assert f"worker-0   {state}" in said
        assert main(["status", "--run", "run-1", "--log", "worker-0"]) == 0
        assert "this is a stand-in for vllm serve" in capsys.readouterr().out
        assert main(["status", "--run", "run-1", "--log", "keeper", "--lines", "3"]) == 0
        log = capsys.readouterr().out
        assert len(log.splitlines()) == 3
        assert key not in said + log
        if state == "ready":
            world.execute("stop")
    assert "has ended: " in said
    assert main(["status", "--run", "run-1", "--log", "worker-7"]) == 2
    assert "there is keeper, worker-0" in capsys.readouterr().err
