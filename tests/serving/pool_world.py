"""A deployment of its own with a run whose earlier stages have succeeded, ready for `start`."""

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tasks import pool_key
from tasks import settings as deployment
from tasks.ledger import Ledger, leases, take
from tasks.ledger.leases import Lease
from tasks.ledger.migrations import migrate
from tasks.node import processes
from tasks.node.processes import Process
from tasks.serving import leftovers, pools
from tasks.serving.pools import Pool
from tasks.settings import Settings
from tasks.stages import Result, execute
from tests.runs import a_run, port_range

STANDIN = Path(__file__).parent / "standin_vllm.py"
RELEASE_ID = "tiny-none-0123456789ab"


def kill(process: object) -> None:
    """SIGKILL for a process that the world names."""
    os.kill(process.pid, signal.SIGKILL)  # type: ignore[attr-defined]


def wait_for(what: str, condition: Callable[[], Any], within_s: float = 60.0) -> Any:
    """The first true value of `condition`; fails when there is none in time."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.05)
    return found


@dataclass
class World:
    """What a test of the pool acts on."""

    home: Path
    url: str
    settings: Settings
    ledger: Ledger
    monkeypatch: pytest.MonkeyPatch
    run_id: str = "run-1"
    runs: list[str] = field(default_factory=list)

    def configure(self, **settings: Any) -> None:
        """Change settings, here and in every process that is started from now on."""
        for name, value in settings.items():
            text = value if isinstance(value, str) else json.dumps(value)
            self.monkeypatch.setenv(f"QWEN_PIPELINE_{name.upper()}", text)
        deployment.current.cache_clear()
        self.settings = deployment.current()

    def add_run(self, run_id: str, *, cores: tuple[int, ...] = (0, 1), to_do: int = 3, **spec: Any) -> None:
        """A run that has come as far as provision: one slot for each of `cores`."""
        release = self.home / "release"
        release.mkdir(exist_ok=True)
        spec.setdefault("layout", {"cpu": len(cores)})
        a_run(self.ledger, run_id, **spec)
        self.runs.append(run_id)
        self.succeed(run_id, "prepare", {"to_do": to_do})
        self.succeed(run_id, "convert", {"release_id": RELEASE_ID, "path": str(release)})
        self.provision(run_id, cores)

    def close_runs(self) -> None:
        """Give every run's devices back, so that another can have them."""
        for lease in leases.live_leases(self.ledger):
            claim, _ = take(self.ledger, lease.run_id, "restore", frozenset({"restore"}))
            leases.release(claim, lease.lease_id, "by the test")
            claim.finish("done", "by the test", {})

    def provision(self, run_id: str, cores: tuple[int, ...]) -> int:
        """Lease the cores, as the stage does; returns the lease."""
        claim, _ = take(self.ledger, run_id, "provision", frozenset({"provision"}))
        devices = [f"cpu:{core}" for core in cores]
        lease = leases.take(claim, self.settings.node, devices, self.settings.lease_s)
        slots = [{"slot_id": f"cpu-{core}", "kind": "cpu", "cores": [core]} for core in cores]
        facts = {"lease_id": lease.lease_id, "node": self.settings.node, "simulated": False, "slots": slots}
        claim.finish("done", "provisioned by the test", facts)
        return lease.lease_id

    def succeed(self, run_id: str, stage: str, facts: dict[str, Any]) -> None:
        """Record that `stage` found `facts`."""
        claim, _ = take(self.ledger, run_id, stage, frozenset({stage}))
        claim.finish("done", "done by the test", facts)

    def execute(self, stage: str, run_id: str | None = None, comes_back: bool = False) -> Result:
        """One stage, in this process."""
        return execute(stage, run_id or self.run_id, settings=self.settings, comes_back=comes_back)

    def lease(self) -> Lease:
        """The only live lease."""
        (found,) = leases.live_leases(self.ledger)
        return found

    def pool(self, run_id: str | None = None) -> Pool:
        """The open pool."""
        found = pools.open_pool(self.ledger, run_id or self.run_id)
        assert found is not None, "there is an open pool"
        return found

    def key(self, pool_id: str | None = None) -> str:
        """The pool's key."""
        return pool_key.derive(self.settings.secret(), pool_id or self.pool().pool_id)

    def registry(self, key: str | None = None) -> dict[str, Any]:
        """What the keeper answers."""
        return get_json(f"{self.pool().registry}/v1/pool", key or self.key())

    def server(self, number: int, run_id: str | None = None) -> Process:
        """The main process of a worker."""
        attempts = pools.attempts(self.ledger, run_id or self.run_id)
        leaders = pools.leaders(one for one in attempts if one.worker_id == f"worker-{number}")
        return leaders[-1]

    def engine(self, number: int) -> Process:
        """The process of a worker that holds the model."""
        for process in leftovers.workers(self.run_id):
            part = processes.part_of(process)
            title = Path(f"/proc/{process.pid}/comm").read_text()
            if part == f"{self.run_id}/worker-{number}" and title.startswith("VLLM::"):
                return process
        raise AssertionError(f"worker-{number} has no engine")

    def processes(self, part: str | None = None) -> list[Process]:
        """Living processes of this deployment."""
        return processes.find(part)

    def workers(self, run_id: str | None = None) -> list[Process]:
        """Living servers and what they forked."""
        return leftovers.workers(run_id or self.run_id)

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Straight from the ledger."""
        with self.ledger.transaction() as connection:
            return list(connection.execute(query))  # type: ignore[arg-type]

    def close(self) -> None:
        """End whatever a failed test left."""
        processes.end_all(lambda: self.processes(), grace_s=0)
        self.ledger.close()
        deployment.current.cache_clear()


def make_world(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> World:
    """A deployment below `tmp_path` whose workers are stand-ins."""
    home = tmp_path / "home"
    home.mkdir()
    for name, content in (("secret", uuid4().hex * 2), ("ledger", url)):
        (home / name).touch(mode=0o600)
        (home / name).write_text(content)
    for name in [name for name in os.environ if name.startswith("QWEN_PIPELINE_")]:
        monkeypatch.delenv(name)
    migrate(url, Path(deployment.REPOSITORY / "sql/migrations"))
    ledger = Ledger(url, deployment.REPOSITORY / "sql")
    world = World(home, url, deployment.current(), ledger, monkeypatch)
    world.configure(
        **{
            "home": str(home),
            "deployment": f"test-{uuid4().hex[:8]}",
            "ledger_url_file": str(home / "ledger"),
            "worker_command": [sys.executable, str(STANDIN)],
            "claim_watch_s": 0.3,
            "registry_poll_s": 0.2,
            "start_timeout_s": 60,
            "port_range": list(port_range()),
            **settings,
        }
    )
    return world


def get_text(url: str, key: str | None = None) -> str:
    """A GET; raises urllib.error.HTTPError for a refusal."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
        return str(response.read().decode())


def get_json(url: str, key: str | None = None) -> dict[str, Any]:
    """A GET; raises urllib.error.HTTPError for a refusal."""
    text = get_text(url, key)
    return dict(json.loads(text)) if text else {}


def status_of(url: str, key: str | None = None) -> int:
    """The status of a GET; 0 when nobody answers."""
    try:
        get_json(url, key)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
    return 200
