"""How one GPU is cut: its profiles and placements, its instances and MIG devices, as the driver tells.

Everything is asked of each device: names, ids and placements differ between products, and nothing here knows
any of them.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pynvml

from tasks.gpu.nvml import text

NAME_PREFIX = "MIG "
"""The driver's profile names begin with it; what people write does not."""


@dataclass(frozen=True, order=True)
class Placement:
    """Where on a GPU an instance is, in memory slices."""

    start: int
    size: int

    @property
    def slices(self) -> frozenset[int]:
        """The memory slices that it takes."""
        return frozenset(range(self.start, self.start + self.size))

    def __str__(self) -> str:
        return f"{self.start}-{self.start + self.size - 1}" if self.size > 1 else str(self.start)


@dataclass(frozen=True)
class Profile:
    """A kind of GPU instance that this device offers."""

    profile_id: int
    name: str
    """As the driver calls it, without its "MIG "."""
    compute_slices: int
    most: int
    """How many of it the GPU can hold."""
    memory_mb: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True, order=True)
class ComputeInstance:
    """A part of a GPU instance; together with it, a MIG device."""

    start: int
    profile_id: int
    ci: int = field(compare=False)
    uuid: str = field(compare=False)


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int
    name: str
    gi: int | None = None
    """The GPU instance that it uses; None on a GPU without MIG."""

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})"


@dataclass(frozen=True)
class Instance:
    """A GPU instance that exists."""

    gi: int
    profile_id: int
    name: str
    placement: Placement
    compute: tuple[ComputeInstance, ...]
    processes: tuple[GpuProcess, ...] = ()
    is_whole: bool = False
    """Whether one compute instance spans it: then it is one MIG device, which a layout can use."""

    @property
    def is_orphan(self) -> bool:
        """Whether nothing can run on it: creating its compute instance failed, or was never tried."""
        return not self.compute

    def __str__(self) -> str:
        kind = f"{self.name} (GPU instance {self.gi})"
        return f"{kind}, which has no compute instance" if self.is_orphan else kind


@dataclass(frozen=True)
class Cut:
    """All about MIG on one GPU."""

    profiles: tuple[Profile, ...]
    instances: tuple[Instance, ...]

    def profile(self, profile_id: int) -> Profile:
        """The profile with that id."""
        return next(each for each in self.profiles if each.profile_id == profile_id)


def read(handle: Any, processes: tuple[GpuProcess, ...]) -> Cut:
    """What `handle`, a GPU's, can be cut into and is cut into.

    Args:
        processes: those on this GPU.
    """
    profiles = tuple(profiles_of(handle))
    found = [one for profile in profiles for one in _instances(handle, profile)]
    devices = _devices(handle) if found else {}
    instances = [_instance(each, devices, processes) for each in found]
    return Cut(profiles, tuple(sorted(instances, key=lambda each: each.placement)))


def profiles_of(handle: Any) -> list[Profile]:
    """What the device offers; placements are answered with MIG off too (seen on an H200, driver 580)."""
    found = []
    for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, enum)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue
        name = text(info.name).removeprefix(NAME_PREFIX)
        found.append(
            Profile(
                *(info.id, name, info.sliceCount, info.instanceCount, info.memorySizeMB),
                _placements(handle, info.id),
            )
        )
    return found


def whole_compute_profile(gpu_instance: Any, compute_slices: int) -> int:
    """The id of the compute instance profile that spans a GPU instance.

    Raises:
        NVMLError_NotFound: the driver offers none.
    """
    for enum in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                gpu_instance, enum, pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            )
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue
        if info.sliceCount == compute_slices:
            return int(info.id)
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)


def _placements(handle: Any, profile_id: int) -> tuple[Placement, ...]:
    room = 32
    count = ctypes.c_uint(room)
    found = (pynvml.c_nvmlGpuInstancePlacement_t * room)()
    try:
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, found, ctypes.byref(count))
    except pynvml.NVMLError_NotSupported:
        return ()
    return tuple(sorted(Placement(one.start, one.size) for one in found[: count.value]))


@dataclass(frozen=True)
class _Found:
    """A GPU instance, before its compute instances are known."""

    handle: Any
    gi: int
    profile: Profile
    placement: Placement


def _instances(handle: Any, profile: Profile) -> list[_Found]:
    count = ctypes.c_uint(profile.most)
    found = (pynvml.c_nvmlGpuInstance_t * profile.most)()
    try:
        pynvml.nvmlDeviceGetGpuInstances(handle, profile.profile_id, found, ctypes.byref(count))
    except pynvml.NVMLError_NotSupported:  # MIG is off
        return []
    infos = [(one, pynvml.nvmlGpuInstanceGetInfo(one)) for one in found[: count.value]]
    return [
        _Found(one, info.id, profile, Placement(info.placement.start, info.placement.size))
        for one, info in infos
    ]


def _devices(handle: Any) -> dict[int, list[tuple[int, str]]]:
    """MIG devices by GPU instance: compute instance and UUID. Their indices have holes."""
    found: dict[int, list[tuple[int, str]]] = {}
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            continue
        gi, ci = pynvml.nvmlDeviceGetGpuInstanceId(device), pynvml.nvmlDeviceGetComputeInstanceId(device)
        found.setdefault(gi, []).append((ci, text(pynvml.nvmlDeviceGetUUID(device))))
    return found


def _instance(
    found: _Found, devices: dict[int, list[tuple[int, str]]], processes: tuple[GpuProcess, ...]
) -> Instance:
    compute: list[ComputeInstance] = []
    spanned = False
    for ci, uuid in devices.get(found.gi, ()):
        part = pynvml.nvmlGpuInstanceGetComputeInstanceById(found.handle, ci)
        info = pynvml.nvmlComputeInstanceGetInfo(part)
        compute.append(ComputeInstance(info.placement.start, info.profileId, ci, uuid))
        spanned = spanned or info.placement.size == found.profile.compute_slices
    return Instance(
        gi=found.gi,
        profile_id=found.profile.profile_id,
        name=found.profile.name,
        placement=found.placement,
        compute=tuple(sorted(compute)),
        processes=tuple(each for each in processes if each.gi == found.gi),
        is_whole=len(compute) == 1 and spanned,
    )
