"""A pool that is kept for people: what a look finds, and how they get at it. The workers are stand-ins."""

import json
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks import ledger as ledger_package
from tasks.cli import main
from tasks.errors import StageFailed
from tasks.ledger import Run
from tasks.ledger.runs import load
from tasks.reap import reap
from tasks.serving import keep
from tasks.serving.keep import State
from tasks.spec.pool import parse_pool
from tests.serving.pool_world import RELEASE_ID, World, make_world, wait_for

SPEC = {"model": {"repo": "owner/name"}, "layout": {"cpu": 1}, "serving": {"max_model_len": 512}}


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A run without a batch that has come as far as provision."""
    made = make_world(tmp_path, database_url, monkeypatch)
    (made.home / "release").mkdir(exist_ok=True)
    ledger_package.register(made.ledger, "run-1", parse_pool(SPEC), {"asked": {}})
    made.runs.append("run-1")
    made.succeed("run-1", "convert", {"release_id": RELEASE_ID, "path": str(made.home / "release")})
    made.provision("run-1", (0,))
    try:
        yield made
    finally:
        made.close()


def look(world: World, run: Run | None = None) -> State:
    return keep.look(world.ledger, run or load(world.ledger, "run-1"), world.settings).state


def test_a_pool_without_a_batch_serves_until_its_time_is_up_or_somebody_stops_it(world: World) -> None:
    world.execute("start")
    assert look(world) is State.SERVES
    run = load(world.ledger, "run-1")
    long_ago = replace(run, due_from=datetime.now(UTC) - timedelta(hours=9))
    assert look(world, long_ago) is State.OVER
    world.execute("stop")
    assert look(world) is State.OVER


def test_a_pool_whose_time_was_over_before_it_got_devices_has_failed(world: World) -> None:
    run = load(world.ledger, "run-1")
    too_late = replace(run, due_from=datetime.now(UTC) - timedelta(hours=9))
    with pytest.raises(
        StageFailed, match=r"the pool's time was over .* before it got devices.*clear the run"
    ):
        look(world, too_late)
    world.execute("start")
    assert look(world, too_late) is State.OVER
    world.execute("stop")
    assert look(world, too_late) is State.OVER
    # Cleared after that, and it waited in vain.
    now = datetime.now(UTC)
    again = replace(run, spec=parse_pool({**SPEC, "until": now.isoformat()}), due_from=now)
    with pytest.raises(StageFailed, match="before it got devices"):
        look(world, again)


def test_a_pool_whose_keeper_was_killed_is_broken_until_it_is_started_again(world: World) -> None:
    world.execute("start")
    keeper = world.pool().keeper
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGKILL)
    wait_for("its end", lambda: not keeper.is_alive())
    assert look(world) is State.BROKEN
    world.execute("start")
    assert look(world) is State.SERVES
    reap(world.settings, run_id="run-1", force=True)
    assert look(world) is State.OVER


def test_whoever_may_ask_a_pool_gets_its_key_in_a_file_and_nowhere_else(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.execute("start")
    key_file = tmp_path / "pool.key"
    assert main(["endpoints", "--run", "run-1", "--key-file", str(key_file), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["model"] == RELEASE_ID
    assert [one["state"] for one in found["endpoints"]] == ["ready"]
    assert key_file.read_text() == world.key()
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert world.key() not in said.out + said.err
    assert main(["endpoints", "--run", "run-1", "--key-file", str(key_file)]) == 2, "no file is overwritten"
    world.execute("stop")
    assert main(["endpoints", "--run", "run-1"]) == 2
    assert "has no pool of workers now" in capsys.readouterr().err
