"""How a keeper is started under systemd; systemd itself is a stand-in here, so is its state."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.errors import StageError, StageFailed
from tasks.node import processes
from tasks.reap import reap
from tasks.serving import keeper_process
from tasks.settings import REPOSITORY
from tests.serving.pool_world import World, wait_for


def a_systemd(world: World, state: str = "active") -> Path:
    """`systemd-run` and `systemctl` in front of the PATH; returns where it notes how it was asked."""
    folder = world.home / "systemd"
    folder.mkdir(exist_ok=True)
    run, control = folder / "systemd-run", folder / "systemctl"
    body = (Path(__file__).parent / "systemd_run").read_text()
    run.write_text(body.replace("/usr/bin/env python3", sys.executable, 1))
    control.write_text(f"#!/bin/sh\necho ActiveState={state}\necho Result=exit-code\necho ExecMainStatus=4\n")
    for program in (run, control):
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    world.monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "asked.json"


def test_a_keeper_becomes_a_unit_with_a_maximum_run_time_and_no_secret_in_sight(world: World) -> None:
    asked_file = a_systemd(world)
    world.configure(keeper_unit="always", worker_environment={"ODD": 'a "b" \\c $d `e`\nf'})
    world.monkeypatch.setenv("QWEN_PIPELINE_LEDGER_URL", world.url)
    world.configure(ledger_url=world.url)
    world.execute("start")
    asked = json.loads(asked_file.read_text())
    words = asked["arguments"]
    assert keeper_process.unit_name(world.pool().pool_id, world.settings) in words
    assert keeper_process.SLICE in words
    assert any(word.startswith("--property=RuntimeMaxSec=") for word in words)
    assert asked["mode"] == "0o600"
    assert list((world.home / "keepers").iterdir()) == [], "read, and removed"
    assert asked["environment"] == processes.environment(
        "run-1/keeper", {"QWEN_PIPELINE_LEDGER_URL": world.url}
    )
    assert world.url not in str(words)
    assert world.pool().keeper == processes.identify(asked["pid"])
    assert world.execute("stop").changed
    assert world.processes() == []


@pytest.mark.parametrize("by", ["start", "reap"])
def test_an_environment_whose_writer_was_killed_is_removed_and_one_in_use_is_not(
    world: World, by: str
) -> None:
    a_systemd(world)
    world.configure(keeper_unit="always")
    killed = subprocess.Popen(["true"])
    killed.wait()
    folder, here = world.home / "keepers", processes.host()
    folder.mkdir()
    in_use = {
        folder / f"{here}-1.environment",
        folder / f"another-host-{killed.pid}.environment",
    }
    left = {
        folder / f"{here}-{killed.pid}.environment",
        folder / "d-keeper-run-1.1.service.environment",  # as an older version named it
    }
    for file in in_use | left:
        file.touch()
    if by == "start":
        world.execute("start")
    else:
        reap(world.settings)
    assert set(folder.iterdir()) == in_use


def test_a_unit_that_ends_at_once_is_told_with_its_log(world: World) -> None:
    a_systemd(world, state="failed")
    world.configure(keeper_unit="always", port_range=[1, 1], serve_host="203.0.113.1")
    with pytest.raises(StageError, match=r"the keeper ended \(exit-code, exit status 4\)"):
        world.execute("start")


def test_without_systemd_a_keeper_gets_a_session_of_its_own(world: World) -> None:
    world.configure(keeper_unit="always")
    world.monkeypatch.setenv("PATH", str(world.home / "nothing"))
    with pytest.raises(StageFailed, match="systemd-run does not answer"):
        keeper_process.start("p", ["true"], {}, world.home / "log", world.settings, 60.0)
    world.monkeypatch.undo()
    world.configure(keeper_unit="auto", home=str(world.home))
    log = world.home / "log"
    started = keeper_process.start(
        "p", [sys.executable, "-c", "import os; print(os.getsid(0))"], {}, log, world.settings, 60.0
    )
    assert wait_for("its end", started.ended) == "ended with exit status 0"
    assert int(log.read_text()) != os.getsid(0)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_reapers_units_are_valid(tmp_path: Path) -> None:
    for unit in sorted((REPOSITORY / "etc" / "systemd").iterdir()):
        text = unit.read_text().replace("/opt/qwen-pipeline/.venv/bin/qwen-pipeline", "/bin/true")
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "qwen-pipeline-reap.timer")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "qwen-pipeline" not in done.stderr
    assert done.returncode == 0, done.stderr
