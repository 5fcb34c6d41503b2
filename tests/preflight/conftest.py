"""A deployment and a run in which everything is there; each test breaks one thing."""

import json
import sys
from types import SimpleNamespace

import pytest

from tasks import ledger as ledger_package
from tasks import stages
from tasks.gpu import nvml
from tasks.gpu.simulated import control
from tasks.settings import Settings
from tasks.weights import hub
from tests.runs import a_spec, open_ledger, settings_of

PINS = {"commit": "c" * 40, "release_id": "name-awq-g128-0123456789ab"}
GIB = 1 << 30
TIB = 1 << 40


@pytest.fixture
def ledger(database_url):
    with open_ledger(database_url) as opened:
        yield opened


@pytest.fixture
def settings(tmp_path, database_url, monkeypatch):
    """A deployment in which everything is there; the interpreters of other environments are this one's."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret").write_text("0123456789abcdef")
    (home / "secret").chmod(0o600)
    (home / "flags.json").write_text(json.dumps({"version": "0.32.0", "flags": ["--seed", "--max-loras"]}))
    (home / "ledger-url").write_text(database_url)
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(hub, "files_of", lambda *_: [SimpleNamespace(size=GIB // 1024)])
    # Else a full machine under test would be what preflight finds.
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=TIB, used=0, free=TIB))
    return settings_of(
        home,
        database_url,
        ledger_url_file=home / "ledger-url",
        python_convert=python,
        python_serving=python,
        python_spark=python,
        serving_flags=home / "flags.json",
        port_range=(20900, 20939),
    )


@pytest.fixture
def rows(tmp_path):
    """Two rows with the columns `id` and `prompt`."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}\n')
    return path


@pytest.fixture
def spec(rows, tmp_path):
    """A spec with which nothing is wrong; arguments replace whole fields."""

    def make(**changes):
        batch = {"input": str(rows), "output": str(tmp_path / "answers"), "id": "id", "prompt": "prompt"}
        small = {"serving": {"kv_cache_memory_mb": 64}, "batch": {**batch, **changes.pop("batch", {})}}
        return a_spec(**{**small, **changes})

    return make


@pytest.fixture
def preflight(ledger, settings):
    """Execute preflight for a spec."""

    def act(of, **changes):
        ledger_package.register(ledger, "run-1", of, {"asked": of.model_dump(mode="json"), **PINS})
        return stages.execute("preflight", "run-1", settings=settings.model_copy(update=changes))

    return act


@pytest.fixture
def simulated(tmp_path):
    """Settings of a node with one simulated H100, MIG on."""
    where = {"nvml": "sim:h100-80*1", "nvml_state": tmp_path / "node"}
    library = nvml.simulation(Settings(home=tmp_path, **where))
    control.set_mode(library.file, True)
    return where
