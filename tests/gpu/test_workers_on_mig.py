"""From a layout to workers that answer, and back: MIG on a simulated node, workers that are stand-ins on CPU cores."""

import pytest

from tasks.gpu import inventory, nvml
from tasks.gpu.simulated import control
from tasks.ledger import leases
from tests.runs import a_run
from tests.serving.pool_world import RELEASE_ID, make_world

LAYOUT = {"mig": {"3g.40gb": 2}, "gpus": 1}


@pytest.fixture
def world(tmp_path, database_url, monkeypatch):
    """A run that is ready for provision, on a simulated node with MIG on."""
    made = make_world(
        tmp_path,
        database_url,
        monkeypatch,
        nvml="sim:a100-80*2",
        nvml_state=str(tmp_path / "node"),
        lease_wait_s=0,
    )
    library = nvml.simulation(made.settings)
    assert library is not None
    control.set_mode(library.file, True)
    a_run(made.ledger, "run-1", layout=LAYOUT)
    release = made.home / "release"
    release.mkdir()
    made.succeed("run-1", "prepare", {"batch_id": "batch-1", "to_do": 3})
    made.succeed("run-1", "convert", {"release_id": RELEASE_ID, "path": str(release)})
    try:
        yield made
    finally:
        made.close()


def test_one_worker_serves_for_each_mig_device_and_the_layout_goes_back(world):
    before = [gpu.instances for gpu in inventory.read(world.settings).gpus]
    provisioned = world.execute("provision")
    assert provisioned.message.startswith("SIMULATED GPUs: ")
    there = [part.uuid for one in inventory.read(world.settings).gpus[0].instances for part in one.compute]
    assert [slot["stands_for"]["uuid"] for slot in provisioned.facts["slots"]] == there
    started = world.execute("start")
    assert started.facts["workers"] == len(there) == 2
    assert not world.execute("provision").changed, "with its workers running"
    world.execute("stop")
    restored = world.execute("restore")
    assert restored.changed
    assert [gpu.instances for gpu in inventory.read(world.settings).gpus] == before
    assert leases.live_leases(world.ledger) == []
    assert world.processes() == []
