"""Memory of devices before, during and after a pool; the driver is a stand-in for the functions that are asked."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tasks.serving import device_memory
from tasks.serving.launch import Slot
from tasks.settings import Settings

GIB = 1 << 30
SLOT = Slot("gpus-0", "gpus", uuids=("GPU-1",))


class Driver:
    """One GPU whose use a test changes; each look may take the next of `uses`."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self) -> None:
        self.uses = [0]
        self.pids: list[int] = []
        self.opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=self.uses.pop(0) if len(self.uses) > 1 else self.uses[0])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.pids]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """In place of pynvml; must be closed as often as it was opened."""
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)  # type: ignore[arg-type]
    yield made
    assert made.opened == 0


def test_memory_is_back_when_it_is_as_before_within_the_tolerance(driver: Driver) -> None:
    driver.uses = [70 * GIB, 70 * GIB, GIB + 100 * 2**20]
    settings = Settings(memory_tolerance_mb=512)
    assert device_memory.wait_until_back({"GPU-1": GIB}, settings, wait_s=30.0) == ("", False)
    assert driver.uses == [GIB + 100 * 2**20], "it was waited for"


def test_who_else_is_on_the_device_is_named(driver: Driver) -> None:
    driver.uses, driver.pids = [70 * GIB], [1, 2**22 + 1]
    differs, named = device_memory.wait_until_back({"GPU-1": GIB}, Settings(), wait_s=0.0)
    assert named
    assert "GPU-1 uses 70.00 GiB, 1.00 GiB before" in differs
    assert "pid 1 (" in differs
    assert "of another container" in differs
    driver.pids = []
    differs, named = device_memory.wait_until_back({"GPU-1": GIB}, Settings(), wait_s=0.0)
    assert not named
    assert "no process that the driver names" in differs


def test_a_worker_whose_memory_went_is_noticed(driver: Driver) -> None:
    driver.uses = [60 * GIB]
    assert device_memory.missing(SLOT, 70 * GIB, Settings()) == ""
    driver.uses = [GIB]
    assert "fell from 70.0 to 1.0 GiB" in device_memory.missing(SLOT, 70 * GIB, Settings())


def test_a_slot_without_devices_a_simulated_node_and_a_lost_device_have_no_memory(driver: Driver) -> None:
    cpu = Slot("cpu-0", "cpu", cores=(0,))
    assert device_memory.used_bytes(cpu, Settings()) == 0
    assert device_memory.kind(cpu, Settings()) == "cpu"
    assert device_memory.kind(SLOT, Settings()) == "NVIDIA H200"
    assert device_memory.read(["GPU-1"], Settings(nvml="sim:any")) == {}
    assert device_memory.read(["GPU-9"], Settings()) == {}
    assert device_memory.missing(Slot("g", "gpus", uuids=("GPU-9",)), 70 * GIB, Settings()) == ""
