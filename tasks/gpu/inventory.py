"""What a node has: its GPUs as the driver's library (NVML) tells, and the CPU cores of this process.

A node without NVIDIA driver is a normal answer here, not an error; so is a GPU that does not answer beside others that
do. `pynvml` is the module of nvidia-ml-py.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pynvml

from tasks.errors import StageFailed
from tasks.gpu import health, instances, nvml
from tasks.gpu.instances import Cut, GpuProcess, Instance
from tasks.gpu.nvml import text
from tasks.settings import Settings

log = logging.getLogger(__name__)

_NOT_CUT = Cut((), ())


@dataclass(frozen=True)
class Gpu:
    """One physical GPU."""

    index: int
    """NVML's, in order of the PCI bus. CUDA may count in another order, so workers are given UUIDs."""
    uuid: str
    name: str
    memory_bytes: int
    mig_mode: bool | None
    """Whether MIG is on now; None for a product that cannot do it."""
    mig_pending: bool | None = None
    """What MIG mode will be after a reset."""
    pci_bus_id: str = ""
    pci_device_id: int = 0
    """Device and vendor, as in 0x233510DE."""
    cut: Cut = _NOT_CUT
    processes: tuple[GpuProcess, ...] = ()
    """All of them, those on MIG devices too."""
    ailments: tuple[str, ...] = ()
    """Why nothing should run on it; empty for a healthy one."""

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Its GPU instances, by place."""
        return self.cut.instances

    def __str__(self) -> str:
        return f"GPU {self.index}"


@dataclass(frozen=True)
class Inventory:
    """The GPUs of this node."""

    gpus: tuple[Gpu, ...]
    """Those that answer."""
    driver_version: str | None
    cuda_version: tuple[int, int] | None
    """The newest CUDA that the driver runs, as (major, minor)."""
    why: str
    """Why there is none; empty when there are some."""
    linked: frozenset[frozenset[str]] = frozenset()
    """Pairs of UUIDs that reach each other over NVLink."""
    simulated: bool = False
    lost: Mapping[int, str] = field(default_factory=dict)
    """By NVML's index: GPUs that do not answer (one that has fallen off the bus), and what the driver says instead."""

    def describe(self) -> str:
        """One line for a person."""
        if not self.gpus:
            return self.why
        names = sorted({gpu.name for gpu in self.gpus})
        label = f"{nvml.SIMULATED}: " if self.simulated else ""
        return f"{label}{len(self.gpus)} GPU(s): {', '.join(names)}, driver {self.driver_version}"

    def gpu(self, uuid: str) -> Gpu | None:
        """The GPU with that UUID."""
        return next((each for each in self.gpus if each.uuid == uuid), None)

    def are_linked(self, uuids: Sequence[str]) -> bool:
        """Whether each of them reaches each other one over NVLink."""
        return all(frozenset(pair) in self.linked for pair in combinations(uuids, 2))


def read(settings: Settings) -> Inventory:
    """The GPUs of this node now.

    Raises:
        InputError: `nvml` names a simulated driver that there is not.
        StageFailed: the driver is there and fails, or there are GPUs and none answers.
    """
    answering: list[tuple[Any, Gpu]] = []
    lost: dict[int, str] = {}
    try:
        with nvml.opened(settings) as present:
            if not present:
                return Inventory((), None, None, "no NVIDIA driver on this node")
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    answering.append((handle, _gpu(index, handle)))
                except pynvml.NVMLError as error:
                    lost[index] = nvml.describe(error)
            if lost and not answering:
                raise _does_not_answer(lost[0])
            linked = _linked(answering)
            version = text(pynvml.nvmlSystemGetDriverVersion())
            cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())  # 12080 is 12.8
    except pynvml.NVMLError as error:
        raise _does_not_answer(nvml.describe(error)) from None
    for index, said in lost.items():
        log.warning("GPU %d does not answer (%s): look at `nvidia-smi` and dmesg", index, said)
    gpus = tuple(gpu for _, gpu in answering)
    xids = health.critical_xids(settings, [gpu.pci_bus_id for gpu in gpus])
    gpus = tuple(replace(gpu, ailments=(*gpu.ailments, *xids.get(gpu.pci_bus_id, ()))) for gpu in gpus)
    why = "" if gpus else f"NVIDIA driver {version}, but no GPU on this node"
    return Inventory(
        gpus, version, (cuda // 1000, cuda % 1000 // 10), why, linked, nvml.is_simulated(settings), lost
    )


def available_cores() -> tuple[int, ...]:
    """The CPU cores that this process may use (its affinity, not the machine's count), sorted."""
    return tuple(sorted(os.sched_getaffinity(0)))


def processes_on(handle: Any) -> tuple[GpuProcess, ...]:
    """Who uses the GPU `handle`, by pid; NVML must be open."""
    try:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError_NoPermission:
        # Of a GPU that is cut, only root sees all at once; of a MIG device, everybody does.
        found = [process for device in _mig_devices(handle) for process in _processes_of_device(device)]
    return tuple(
        GpuProcess(
            each.pid, _name(each.pid), None if each.gpuInstanceId == 0xFFFFFFFF else each.gpuInstanceId
        )
        for each in sorted(found, key=lambda each: each.pid)
    )


def _does_not_answer(said: str) -> StageFailed:
    return StageFailed(
        f"the NVIDIA driver of this node does not answer ({said}): look at `nvidia-smi` and dmesg"
    )


def _gpu(index: int, handle: Any) -> Gpu:
    mode = _mig_mode(handle)
    pci = pynvml.nvmlDeviceGetPciInfo(handle)
    processes = processes_on(handle)
    return Gpu(
        index=index,
        uuid=text(pynvml.nvmlDeviceGetUUID(handle)),
        name=text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        mig_mode=mode[0],
        mig_pending=mode[1],
        pci_bus_id=text(pci.busId),
        pci_device_id=int(pci.pciDeviceId),
        cut=_NOT_CUT if mode[0] is None else instances.read(handle, processes),
        processes=processes,
        ailments=tuple(health.ailments(handle)),
    )


def _mig_mode(handle: Any) -> tuple[bool | None, bool | None]:
    try:
        current, pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return None, None
    return current == pynvml.NVML_DEVICE_MIG_ENABLE, pending == pynvml.NVML_DEVICE_MIG_ENABLE


def _processes_of_device(device: Any) -> list[Any]:
    found: list[Any] = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    return found


def _mig_devices(handle: Any) -> list[Any]:
    devices = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            devices.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            continue
    return devices


def _name(pid: int) -> str:
    try:
        return text(pynvml.nvmlSystemGetProcessName(pid))
    except pynvml.NVMLError:
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            return "of another container or user"


def _linked(answering: Sequence[tuple[Any, Gpu]]) -> frozenset[frozenset[str]]:
    """With MIG on there is no peer access, so those are not asked."""
    pairs = set()
    whole = [(handle, gpu.uuid) for handle, gpu in answering if not gpu.mig_mode]
    for (one, uuid), (other, other_uuid) in combinations(whole, 2):
        try:
            status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except pynvml.NVMLError:  # not supported, or one of them has just been lost
            continue
        if status == pynvml.NVML_P2P_STATUS_OK:
            pairs.add(frozenset((uuid, other_uuid)))
    return frozenset(pairs)
