"""A node with two H100 and three cores, and stages on it."""

import pytest

from tasks import stages
from tasks.gpu import inventory
from tasks.node import processes
from tests.gpu.node import a_node
from tests.runs import a_run, open_ledger, settings_of

CORES = (0, 1, 2)


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr(inventory, "available_cores", lambda: CORES)


@pytest.fixture
def node(tmp_path):
    return a_node(tmp_path, "h100-80*2", mig=True)


@pytest.fixture
def settings(tmp_path, database_url, node):
    simulated = {"nvml": node.settings.nvml, "nvml_state": node.settings.nvml_state}
    own = settings_of(tmp_path, database_url, lease_wait_s=0, **simulated)
    yield own
    processes.end_all(lambda: processes.find(deployment=own.deployment), grace_s=0)


@pytest.fixture
def ledger(database_url):
    with open_ledger(database_url) as opened:
        yield opened


@pytest.fixture
def run(ledger):
    return a_run(ledger, layout={"cpu": 2})


@pytest.fixture
def execute(settings):
    """Execute a stage of a run here, or on another node."""

    def act(stage, run_id="run-1", **changes):
        return stages.execute(stage, run_id, settings=settings.model_copy(update=changes))

    return act
