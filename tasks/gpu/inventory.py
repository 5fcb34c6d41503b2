"""What a node has: its GPUs as the driver's library (NVML) tells, and the CPU cores of this process.

A node without NVIDIA driver is a normal answer here, not an error. `pynvml` is the module of nvidia-ml-py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tasks.errors import InputError, StageFailed
from tasks.settings import Settings


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


@dataclass(frozen=True)
class Inventory:
    """The GPUs of this node."""

    gpus: tuple[Gpu, ...]
    driver_version: str | None
    cuda_version: tuple[int, int] | None
    """The newest CUDA that the driver runs, as (major, minor)."""
    why: str
    """Why there is none; empty when there are some."""

    def describe(self) -> str:
        """One line for a person."""
        if not self.gpus:
            return self.why
        names = sorted({gpu.name for gpu in self.gpus})
        return f"{len(self.gpus)} GPU(s): {', '.join(names)}, driver {self.driver_version}"


def read(settings: Settings) -> Inventory:
    """The GPUs of this node now.

    Raises:
        InputError: `nvml` names a simulated driver.
        StageFailed: the driver is there and fails.
    """
    if settings.nvml != "driver":
        raise InputError(
            f"QWEN_PIPELINE_NVML={settings.nvml}: there is no simulated driver in this version; leave it at "
            f"`driver`, which finds no GPU where there is none"
        )
    import pynvml

    try:
        with _nvml() as present:
            if not present:
                return Inventory((), None, None, "no NVIDIA driver on this node")
            gpus = tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
            version = _text(pynvml.nvmlSystemGetDriverVersion())
            cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())  # 12080 is 12.8
    except pynvml.NVMLError as error:
        raise StageFailed(
            f"the NVIDIA driver of this node does not answer ({error}): look at `nvidia-smi` and dmesg"
        ) from None
    why = "" if gpus else f"NVIDIA driver {version}, but no GPU on this node"
    return Inventory(gpus, version, (cuda // 1000, cuda % 1000 // 10), why)


def available_cores() -> tuple[int, ...]:
    """The CPU cores that this process may use (its affinity, not the machine's count), sorted."""
    return tuple(sorted(os.sched_getaffinity(0)))


@contextmanager
def _nvml() -> Iterator[bool]:
    """NVML, initialised for the block; False where there is no driver to talk to."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        mig_mode=_mig_mode(handle),
    )


def _mig_mode(handle: Any) -> bool | None:
    import pynvml

    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return None
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _text(value: str | bytes) -> str:
    # nvidia-ml-py gives str since version 11.5, and bytes before.
    return value.decode() if isinstance(value, bytes) else value
