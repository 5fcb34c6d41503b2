"""MIG as the driver does it: profiles, placements, instances, modes, and the ways in which each is refused."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pynvml

from tasks.gpu.simulated.handles import Handles, Refused, Thing, number_of, put, referenced, set_pointer
from tasks.gpu.simulated.products import CI_PROFILES, PRODUCTS, GiProfile
from tasks.gpu.simulated.state import State, StateFile, next_uuid

Gpu = dict[str, Any]
Instance = dict[str, Any]

_COMPUTE_SLICES = 7


class MigFunctions:
    """The part of the library that is about MIG."""

    _file: StateFile
    _now: State
    """As it is at this call."""
    _handles: Handles
    _seen: dict[int, dict[int, Thing]]
    """By GPU and index: MIG devices that this process has seen since its nvmlInit. Destroyed ones stay there."""
    calls: Counter[str]
    fault: Callable[[str, int], int | None] | None

    def _may_change(self, state: State) -> bool:
        raise NotImplementedError

    # Mode

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        put(current, int(gpu["mig"]))
        put(pending, int(gpu["mig_pending"]))

    def nvmlDeviceSetMigMode(self, handle: Any, mode: Any, activation: Any) -> None:
        index = self._handles.thing(handle, "gpu")[1]
        with self._changing() as state:
            gpu = state["gpus"][index]
            gpu["mig_pending"] = bool(number_of(mode))
            put(activation, pynvml.NVML_SUCCESS)
            if gpu["mig"] == gpu["mig_pending"]:
                return
            if gpu["processes"] or gpu["hidden_clients"] or gpu["instances"] or gpu["drm_holds"]:
                put(activation, pynvml.NVML_ERROR_IN_USE)
            elif not PRODUCTS[state["product"]].resetless:
                put(activation, pynvml.NVML_ERROR_RESET_REQUIRED)
            else:
                gpu["mig"] = gpu["mig_pending"]

    # Profiles and placements

    def nvmlDeviceGetGpuInstanceProfileInfoV(self, handle: Any, enum: Any, info: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        if number_of(enum) > 0x11:
            raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for profile in self._profiles(gpu):
            if profile.enum == number_of(enum):
                found = referenced(info)
                found.id, found.sliceCount, found.instanceCount = (
                    profile.profile_id,
                    profile.slices,
                    profile.most,
                )
                found.multiprocessorCount, found.copyEngineCount = profile.sms, profile.copy_engines
                found.memorySizeMB, found.name = profile.memory_mb, profile.name.encode()
                return
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        self, handle: Any, profile_id: Any, placements: Any, count: Any
    ) -> None:
        profile = self._profile(self._gpu(self._handles.thing(handle, "gpu")), number_of(profile_id))
        room, referenced(count).value = referenced(count).value, len(profile.starts)
        if placements is None:
            return
        if room < len(profile.starts):
            raise Refused(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for place, start in zip(placements, profile.starts, strict=False):
            place.start, place.size = start, profile.size

    def nvmlDeviceGetGpuInstanceRemainingCapacity(self, handle: Any, profile_id: Any, count: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        profile, there = self._profile(gpu, number_of(profile_id)), [*gpu["instances"]]
        fits = 0
        while (start := self._free_start(gpu, there, profile)) is not None:
            there.append({"profile_id": profile.profile_id, "start": start, "size": profile.size})
            fits += 1
        put(count, fits)

    # GPU instances

    def nvmlDeviceCreateGpuInstance(self, handle: Any, profile_id: Any, instance: Any) -> None:
        self._create(self._handles.thing(handle, "gpu")[1], number_of(profile_id), None, instance)

    def nvmlDeviceCreateGpuInstanceWithPlacement(
        self, handle: Any, profile_id: Any, placement: Any, instance: Any
    ) -> None:
        wanted = referenced(placement)
        place = (wanted.start, wanted.size)
        self._create(self._handles.thing(handle, "gpu")[1], number_of(profile_id), place, instance)

    def nvmlDeviceGetGpuInstances(self, handle: Any, profile_id: Any, instances: Any, count: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        profile = self._profile(gpu, number_of(profile_id))
        found = [each for each in gpu["instances"] if each["profile_id"] == profile.profile_id]
        referenced(count).value = len(found)
        for place, instance in enumerate(found):
            pointer = instances[place]
            set_pointer(pointer, self._handles.number(_gi(gpu, instance)))
            instances[place] = pointer

    def nvmlDeviceGetGpuInstanceById(self, handle: Any, gi: Any, instance: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        self._handles.put(instance, _gi(gpu, self._instance(gpu, number_of(gi))))

    def nvmlGpuInstanceGetInfo(self, handle: Any, info: Any) -> None:
        _, instance = self._behind(handle)
        found = referenced(info)
        found.id, found.profileId = instance["gi"], instance["profile_id"]
        found.placement.start, found.placement.size = instance["start"], instance["size"]

    def nvmlGpuInstanceDestroy(self, handle: Any) -> None:
        thing = self._handles.thing(handle, "gi")
        with self._changing() as state:
            gpu = state["gpus"][thing[1]]
            instance = self._same(gpu, thing)
            if instance["compute"] or _used(gpu, instance["gi"]):
                raise Refused(pynvml.NVML_ERROR_IN_USE)
            held = _count_down(gpu, "hidden_clients")
            if not held and not _count_down(gpu, "leaves_remnants"):
                gpu["instances"].remove(instance)
        if held:
            raise Refused(pynvml.NVML_ERROR_IN_USE)

    # Compute instances

    def nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        self, handle: Any, enum: Any, engine: Any, info: Any
    ) -> None:
        gpu, instance = self._behind(handle)
        profile = self._profile(gpu, instance["profile_id"])
        for known, slices in CI_PROFILES:
            if known == number_of(enum) and slices <= profile.slices and number_of(engine) == 0:
                found = referenced(info)
                found.id, found.sliceCount, found.instanceCount = known, slices, profile.slices // slices
                found.name = (
                    profile.name
                    if slices == profile.slices
                    else f"MIG {slices}c.{profile.name.removeprefix('MIG ')}"
                ).encode()
                return
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlGpuInstanceCreateComputeInstance(self, handle: Any, profile_id: Any, made: Any) -> None:
        self._create_compute(handle, number_of(profile_id), None, made)

    def nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        self, handle: Any, profile_id: Any, placement: Any, made: Any
    ) -> None:
        self._create_compute(handle, number_of(profile_id), referenced(placement).start, made)

    def nvmlGpuInstanceGetComputeInstanceById(self, handle: Any, ci: Any, found: Any) -> None:
        gpu, instance = self._behind(handle)
        for compute in instance["compute"]:
            if compute["ci"] == number_of(ci):
                return self._handles.put(
                    found, ("ci", gpu["index"], instance["gi"], compute["ci"], compute["uuid"])
                )
        raise Refused(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlComputeInstanceGetInfo_v2(self, handle: Any, info: Any) -> None:
        thing = self._handles.thing(handle, "ci")
        compute = self._compute(self._gpu(thing), thing)
        found = referenced(info)
        found.id, found.profileId = compute["ci"], compute["profile_id"]
        found.placement.start, found.placement.size = compute["start"], compute["size"]

    def nvmlComputeInstanceDestroy(self, handle: Any) -> None:
        thing = self._handles.thing(handle, "ci")
        with self._changing() as state:
            gpu = state["gpus"][thing[1]]
            compute = self._compute(gpu, thing)
            if _used(gpu, thing[2], compute["ci"]):
                raise Refused(pynvml.NVML_ERROR_IN_USE)
            held = _count_down(gpu, "hidden_clients")
            if not held:
                self._instance(gpu, thing[2])["compute"].remove(compute)
        if held:
            raise Refused(pynvml.NVML_ERROR_IN_USE)

    # MIG devices

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> None:
        put(count, _COMPUTE_SLICES if self._gpu(self._handles.thing(handle, "gpu"))["mig"] else 0)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, device: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        seen = self._seen.setdefault(gpu["index"], {})
        for instance in gpu["instances"]:
            for compute in instance["compute"]:
                seen[compute["index"]] = mig_device(gpu, instance, compute)
        if number_of(index) not in seen:
            raise Refused(pynvml.NVML_ERROR_NOT_FOUND)
        self._handles.put(device, seen[number_of(index)])

    def nvmlDeviceIsMigDeviceHandle(self, handle: Any, answer: Any) -> None:
        put(answer, int(self._handles.thing(handle, "gpu", "mig")[0] == "mig"))

    def nvmlDeviceGetGpuInstanceId(self, handle: Any, gi: Any) -> None:
        put(gi, self._handles.thing(handle, "mig")[2])

    def nvmlDeviceGetComputeInstanceId(self, handle: Any, ci: Any) -> None:
        put(ci, self._handles.thing(handle, "mig")[3])

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any, device: Any) -> None:
        self._handles.put(device, ("gpu", self._handles.thing(handle, "mig")[1]))

    # What they stand on

    def _changing(self) -> Any:
        if not self._may_change(self._now):
            raise Refused(pynvml.NVML_ERROR_NO_PERMISSION)
        return self._file.changing()

    def _gpu(self, thing: Thing) -> Gpu:
        gpu: Gpu = self._now["gpus"][thing[1]]
        if gpu.get("lost"):  # the file of an older version says nothing
            raise Refused(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu

    def _behind(self, handle: Any) -> tuple[Gpu, Instance]:
        thing = self._handles.thing(handle, "gi")
        gpu = self._gpu(thing)
        return gpu, self._same(gpu, thing)

    def _instance(self, gpu: Gpu, gi: int) -> Instance:
        for instance in gpu["instances"]:
            if instance["gi"] == gi:
                found: Instance = instance
                return found
        raise Refused(pynvml.NVML_ERROR_NOT_FOUND)

    def _same(self, gpu: Gpu, thing: Thing) -> Instance:
        """The instance of a handle; another one that has got its id since is not it."""
        instance = self._instance(gpu, thing[2])
        if instance["made"] != thing[3]:
            raise Refused(pynvml.NVML_ERROR_NOT_FOUND)
        return instance

    def _compute(self, gpu: Gpu, thing: Thing) -> dict[str, Any]:
        for compute in self._instance(gpu, thing[2])["compute"]:
            if compute["uuid"] == thing[4]:
                found: dict[str, Any] = compute
                return found
        raise Refused(pynvml.NVML_ERROR_NOT_FOUND)

    def _profiles(self, gpu: Gpu) -> Sequence[GiProfile]:
        if not gpu["profile_overrides"]:
            return PRODUCTS[self._now["product"]].profiles
        profiles = []
        for profile in PRODUCTS[self._now["product"]].profiles:
            changes = gpu["profile_overrides"].get(str(profile.profile_id), {})
            if not changes.get("absent"):
                known: dict[str, Any] = {
                    name: tuple(v) if isinstance(v, list) else v for name, v in changes.items()
                }
                profiles.append(replace(profile, **known) if known else profile)
        return profiles

    def _profile(self, gpu: Gpu, profile_id: int) -> GiProfile:
        for profile in self._profiles(gpu):
            if profile.profile_id == profile_id:
                return profile
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _create(self, index: int, profile_id: int, place: tuple[int, int] | None, made: Any) -> None:
        with self._changing() as state:
            gpu = state["gpus"][index]
            if not gpu["mig"]:
                raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
            profile = self._profile(gpu, profile_id)
            if place is not None and (place[0] not in profile.starts or place[1] != profile.size):
                raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            start = self._free_start(gpu, gpu["instances"], profile, place[0] if place else None)
            if start is None:
                raise Refused(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            state["made"] += 1
            used = {each["gi"] for each in gpu["instances"]}
            instance = {
                "gi": next(number for number in range(1, 99) if number not in used),
                "made": state["made"],
                "profile_id": profile_id,
                "start": start,
                "size": profile.size,
                "compute": [],
            }
            gpu["instances"].append(instance)
            self._handles.put(made, _gi(gpu, instance))

    def _free_start(
        self, gpu: Gpu, there: list[Instance], profile: GiProfile, only: int | None = None
    ) -> int | None:
        taken = {number for each in there for number in range(each["start"], each["start"] + each["size"])}
        slices = sum(self._profile(gpu, each["profile_id"]).slices for each in there)
        same = sum(each["profile_id"] == profile.profile_id for each in there)
        if same >= profile.most or slices + profile.slices > _COMPUTE_SLICES:
            return None
        for start in profile.starts if only is None else (only,):
            if not taken & set(range(start, start + profile.size)):
                return start
        return None

    def _create_compute(self, handle: Any, profile_id: int, wanted: int | None, made: Any) -> None:
        thing = self._handles.thing(handle, "gi")
        with self._changing() as state:
            gpu = state["gpus"][thing[1]]
            instance = self._same(gpu, thing)
            total = self._profile(gpu, instance["profile_id"]).slices
            slices = dict(CI_PROFILES).get(profile_id)
            if slices is None or slices > total:
                raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            taken = {
                n for each in instance["compute"] for n in range(each["start"], each["start"] + each["size"])
            }
            starts = range(total - slices + 1) if wanted is None else (wanted,)
            free = [start for start in starts if not taken & set(range(start, start + slices))]
            if not free or free[0] + slices > total:
                raise Refused(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
            ids = {each["ci"] for each in instance["compute"]}
            indices = {each["index"] for other in gpu["instances"] for each in other["compute"]}
            compute = {
                "ci": next(number for number in range(99) if number not in ids),
                "index": next(number for number in range(99) if number not in indices),
                "uuid": next_uuid(state),
                "profile_id": profile_id,
                "start": free[0],
                "size": slices,
            }
            instance["compute"].append(compute)
            self._handles.put(made, ("ci", gpu["index"], instance["gi"], compute["ci"], compute["uuid"]))


def mig_device(gpu: Gpu, instance: Instance, compute: dict[str, Any]) -> Thing:
    """What a MIG device's handle names."""
    return ("mig", gpu["index"], instance["gi"], compute["ci"], compute["uuid"])


def _gi(gpu: Gpu, instance: Instance) -> Thing:
    return ("gi", gpu["index"], instance["gi"], instance["made"])


def _used(gpu: Gpu, gi: int, ci: int | None = None) -> bool:
    return any(each["gi"] == gi and ci in (None, each["ci"]) for each in gpu["processes"])


def _count_down(gpu: Gpu, name: str) -> bool:
    """Whether this is to happen now: so many times, or always when negative."""
    left = gpu[name]
    gpu[name] = max(left - 1, 0) if left >= 0 else left
    return bool(left)
