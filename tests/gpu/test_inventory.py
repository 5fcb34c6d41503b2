"""What a node has, as the driver tells. The driver here is a stand-in that answers the calls it gets."""

from types import SimpleNamespace

import pynvml
import pytest

from tasks.errors import InputError, StageFailed
from tasks.gpu import inventory
from tasks.settings import Settings


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path)


@pytest.fixture
def driver(monkeypatch):
    """A driver with two GPUs, one with MIG on and one that does not know MIG."""
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: closed.append(True),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlSystemGetDriverVersion": lambda: "580.159.04",
        "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200" if handle else "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=150754820096),
        "nvmlDeviceGetMigMode": mig_mode,
    }
    closed = []
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return closed


def mig_mode(handle):
    if handle == 1:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return [1, 1]


def fail_with(code):
    def fail(*_):
        raise pynvml.NVMLError(code)

    return fail


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_node_without_a_driver_has_no_gpu_and_says_why(settings, monkeypatch, code):
    monkeypatch.setattr(pynvml, "nvmlInit", fail_with(code))
    found = inventory.read(settings)
    assert (found.gpus, found.why, found.describe()) == ((), *["no NVIDIA driver on this node"] * 2)


def test_gpus_are_read_from_the_driver(settings, driver):
    found = inventory.read(settings)
    assert [(gpu.index, gpu.uuid, gpu.mig_mode) for gpu in found.gpus] == [
        (0, "GPU-0", True),
        (1, "GPU-1", None),
    ]
    assert {(gpu.name, gpu.memory_bytes) for gpu in found.gpus} == {("NVIDIA H200", 150754820096)}
    assert (found.driver_version, found.cuda_version, found.why) == ("580.159.04", (13, 1), "")
    assert found.describe() == "2 GPU(s): NVIDIA H200, driver 580.159.04"
    assert driver == [True]


def test_a_driver_without_gpus_is_told_apart_from_no_driver(settings, driver, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    assert inventory.read(settings).why == "NVIDIA driver 580.159.04, but no GPU on this node"


def test_a_driver_that_fails_is_not_a_node_without_gpus(settings, driver, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", fail_with(pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(StageFailed, match=r"does not answer.*nvidia-smi"):
        inventory.read(settings)
    assert driver == [True]


def test_a_simulated_driver_is_never_taken_silently(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="QWEN_PIPELINE_NVML=sim:a100-80: there is no simulated driver"):
        inventory.read(Settings(home=tmp_path, nvml="sim:a100-80"))


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {6, 2})
    assert inventory.available_cores() == (2, 6)
