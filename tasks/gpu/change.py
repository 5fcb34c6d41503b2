"""The only code that changes GPUs: creates and destroys instances, switches MIG mode, and takes back what half
succeeded.

Keeps:
- a change that fails leaves the layout that was there before it, or says what of it is missing;
- a change whose asker is gone ends like its asker: where it is, and under the lock for which its successor waits;
- an instance in use is not destroyed: asked before, and refused by the driver;
- NVML is initialised anew before the result is read, because destroyed MIG devices stay enumerable otherwise
  (libcudacxx #224); what was destroyed is looked for, because success is reported also where remnants stay
  (go-nvml #146).

Runs in the stage's process where that has the rights, and in the privileged helper where not.
"""

import ctypes
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pynvml

from tasks.errors import StageFailed
from tasks.gpu import holders, instances, inventory, nvml, rights
from tasks.gpu.instances import Instance
from tasks.gpu.inventory import Gpu
from tasks.gpu.layouts import GpuLayout, Spot, Step, difference, layout_of
from tasks.node import lock
from tasks.settings import Settings

log = logging.getLogger(__name__)

_IN_USE_TRIES = 5
_IN_USE_PAUSE_S = 0.4
"""DCGM lets go of an instance within a second (DCGM #276); who does not is named."""


@dataclass(frozen=True)
class Report:
    """What came of a change."""

    error: str = ""
    """Empty: everything was done, and is there."""
    kind: str = "done"
    """`done`, or who can help: `busy`, `pending` (a reset or reboot), `rights`, `failed`."""
    changes: int = 0
    """Steps that were done, those of taking back not counted."""
    left: tuple[str, ...] = ()
    """After a failure: what is not as it was before. Empty: it was taken back."""


class _Failed(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def carry_out(
    steps: Sequence[Step], settings: Settings, is_wanted: Callable[[], bool] = lambda: True
) -> Report:
    """Do `steps` in this process, or none of them. What is already as a step wants it is left so.

    Args:
        is_wanted: asked before each step. Once it says no, nothing more is done, and nothing taken back: whoever
            acts after the one who wanted it goes on from what is there.

    Raises:
        Busy: somebody else changes GPUs of this node right now.
    """
    with lock.held(lock_path(settings), "a change of the MIG layout", settings.lock_wait_s):
        before = {gpu.uuid: gpu for gpu in inventory.read(settings).gpus}
        change = _Change(before, settings, is_wanted)
        try:
            _refuse(steps, before, settings)
            change.make(steps)
            _look(steps, settings)
        except (_Failed, pynvml.NVMLError, StageFailed) as error:
            kind, message = _cause(error, change)
            log.warning("%s; taking back what was done before", message)
            return Report(message, kind, change.done, _take_back(steps, before, settings, is_wanted))
        return Report(changes=change.done)


def lock_path(settings: Settings) -> Path:
    """One lock for everybody who changes GPUs of this node, whatever deployment they belong to."""
    if settings.nvml_state is not None:
        return settings.nvml_state.with_name(settings.nvml_state.name + ".change")
    # Nobody but root can put a link there.
    return Path("/run/qwen-pipeline-mig.lock") if os.geteuid() == 0 else settings.locks / "mig.lock"


def _refuse(steps: Sequence[Step], gpus: Mapping[str, Gpu], settings: Settings) -> None:
    """What cannot be right is refused before the first change."""
    if missing := rights.missing(settings, steps):
        raise _Failed("rights", missing)
    for step in steps:
        gpu = gpus.get(step.gpu_uuid)
        if gpu is None or gpu.mig_mode is None:
            raise _Failed("failed", f"there is no GPU {step.gpu_uuid} here that can be cut")
        if step.spot is None:
            if gpu.mig_mode != step.on and gpu.processes:
                users = ", ".join(map(str, gpu.processes))
                raise _Failed("busy", f"MIG mode of {gpu} cannot change while {users} use(s) it")
            continue
        known = [p for p in gpu.cut.profiles if p.profile_id == step.spot.profile_id]
        if not known or step.spot.placement not in known[0].placements:
            raise _Failed("failed", f"{gpu} offers no {step.spot}")
        if step.do == "destroy" and (there := _find(gpu, step.spot)) is not None and there.processes:
            users = ", ".join(map(str, there.processes))
            raise _Failed("busy", f"{there} of {gpu} is in use by {users}")


class _Change:
    """Steps, done one after the other, with the fewest calls: what there is was read before, under the lock."""

    def __init__(self, gpus: Mapping[str, Gpu], settings: Settings, is_wanted: Callable[[], bool]) -> None:
        self._gpus = gpus
        self._settings = settings
        self._is_wanted = is_wanted
        self._whole: dict[tuple[str, int], int] = {}
        self.done = 0
        self.now: Step | None = None

    def make(self, steps: Sequence[Step]) -> None:
        """All of them, in order."""
        # A change of mode may reset the device, so what follows it gets a new session.
        for _, together in groupby(steps, key=lambda step: step.do == "mode"):
            with nvml.opened(self._settings):
                handles: dict[str, Any] = {}
                for self.now in together:
                    if not self._is_wanted():
                        raise _Failed("failed", f"the change was called off before the step: {self.now}")
                    uuid = self.now.gpu_uuid
                    if uuid not in handles:
                        handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                    self.done += self._do(self.now, self._gpus[uuid], handles[uuid])

    def gpu_of(self, step: Step | None) -> Gpu | None:
        """Which GPU a step is about."""
        return self._gpus.get(step.gpu_uuid) if step else None

    def _do(self, step: Step, gpu: Gpu, handle: Any) -> bool:
        """False when nothing was to be done."""
        if step.spot is None:
            return self._set_mode(step.on, gpu, handle)
        there = _find(gpu, step.spot)
        if step.do == "destroy":
            return there is not None and self._destroy(there, gpu, handle)
        if there is not None and step.spot.is_met_by(there):
            return False
        if there is not None and there.is_orphan and step.do == "complete":
            self._compute(step.spot, gpu, pynvml.nvmlDeviceGetGpuInstanceById(handle, there.gi))
            return True
        place = pynvml.c_nvmlGpuInstancePlacement_t(step.spot.placement.start, step.spot.placement.size)
        made = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(
            *(handle, step.spot.profile_id),
            ctypes.byref(place),  # the bare structure crashes the process
        )
        self._compute(step.spot, gpu, made)
        return True

    def _compute(self, spot: Spot, gpu: Gpu, gpu_instance: Any) -> None:
        for start, profile_id in spot.compute or ():
            part = pynvml.c_nvmlComputeInstancePlacement_t(start, _compute_size(gpu_instance, profile_id))
            pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(
                gpu_instance, profile_id, ctypes.byref(part)
            )
        if spot.compute is None:
            kind = (gpu.uuid, spot.profile_id)
            if kind not in self._whole:
                slices = gpu.cut.profile(spot.profile_id).compute_slices
                self._whole[kind] = instances.whole_compute_profile(gpu_instance, slices)
            pynvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, self._whole[kind])

    def _set_mode(self, on: bool, gpu: Gpu, handle: Any) -> bool:
        current, pending = pynvml.nvmlDeviceGetMigMode(handle)
        if current == pending == int(on):
            return False
        # It returns how activating went, and raises only when it could not even be asked.
        status = pynvml.nvmlDeviceSetMigMode(handle, int(on))
        now, pending = pynvml.nvmlDeviceGetMigMode(handle)
        wanted = "on" if on else "off"
        if status == pynvml.NVML_ERROR_IN_USE:
            who = holders.describe(self._settings, gpu.uuid)
            raise _Failed("busy", f"MIG mode of {gpu} does not go {wanted}: it is in use; {who}")
        if now != int(on):
            raise _Failed(
                "pending",
                f"MIG mode of {gpu} goes {wanted} only with a reset or reboot: `nvidia-smi --gpu-reset -i "
                f"{gpu.index}` as root when nothing uses it, or reboot where a reset is not supported; then try "
                f"again. No instance was created or destroyed",
            )
        if status != pynvml.NVML_SUCCESS:
            raise _Failed("failed", f"activating MIG mode {wanted} of {gpu} ended with NVML error {status}")
        return True

    def _destroy(self, there: Instance, gpu: Gpu, handle: Any) -> bool:
        gpu_instance = pynvml.nvmlDeviceGetGpuInstanceById(handle, there.gi)
        for compute in there.compute:
            part = pynvml.nvmlGpuInstanceGetComputeInstanceById(gpu_instance, compute.ci)
            self._unless_in_use(pynvml.nvmlComputeInstanceDestroy, part, there, gpu, handle)
        self._unless_in_use(pynvml.nvmlGpuInstanceDestroy, gpu_instance, there, gpu, handle)
        return True

    def _unless_in_use(
        self, destroy: Callable[[Any], Any], what: Any, there: Instance, gpu: Gpu, handle: Any
    ) -> None:
        for attempt in range(1, _IN_USE_TRIES + 1):
            try:
                destroy(what)
                return
            except pynvml.NVMLError_InUse:
                users = [str(each) for each in inventory.processes_on(handle) if each.gi == there.gi]
                if users:
                    raise _Failed("busy", f"{there} of {gpu} is in use by {', '.join(users)}") from None
                if attempt == _IN_USE_TRIES:
                    who = holders.describe(self._settings, gpu.uuid)
                    raise _Failed(
                        "busy",
                        f"{there} of {gpu} cannot be destroyed: it is in use, and no process is listed on it; {who}",
                    ) from None
                time.sleep(_IN_USE_PAUSE_S)


def _look(steps: Sequence[Step], settings: Settings) -> None:
    """Whether everything is as the steps promise, read anew."""
    gpus = {gpu.uuid: gpu for gpu in inventory.read(settings).gpus}
    for step in steps:
        gpu = gpus.get(step.gpu_uuid)
        if gpu is None:
            raise _Failed("failed", f"GPU {step.gpu_uuid} does not answer any more")
        if step.spot is None:
            if gpu.mig_mode != step.on:
                raise _Failed("failed", f"MIG mode of {gpu} is not {'on' if step.on else 'off'} after all")
            continue
        there = _find(gpu, step.spot)
        again = there is not None and any(
            other.do == "create" and other.spot is not None and other.spot.is_at(there) for other in steps
        )
        if step.do == "destroy" and there is not None and not again:
            raise _Failed(
                "failed", f"{there} of {gpu} is still listed although destroying it was reported as done"
            )
        if step.do != "destroy" and (there is None or not step.spot.is_met_by(there)):
            raise _Failed("failed", f"{step.spot} is not on {gpu} although creating it was reported as done")


def _take_back(
    steps: Sequence[Step], before: Mapping[str, Gpu], settings: Settings, is_wanted: Callable[[], bool]
) -> tuple[str, ...]:
    """Back to the layout before `steps`, as far as it goes; returns what is not as it was."""
    touched = {step.gpu_uuid for step in steps if step.gpu_uuid in before}
    made = {(step.gpu_uuid, step.spot) for step in steps if step.do == "create"}
    try:
        now = {gpu.uuid: gpu for gpu in inventory.read(settings).gpus if gpu.uuid in touched}
        back = _Change(now, settings, is_wanted)
        for step in (step for gpu in now.values() for step in _steps_back(gpu, before[gpu.uuid], made)):
            # What cannot be taken back must not keep the rest from it.
            try:
                back.make([step])
            except (_Failed, pynvml.NVMLError) as error:
                log.warning("taking back: %s", _cause(error, back)[1])
        after = {gpu.uuid: gpu for gpu in inventory.read(settings).gpus if gpu.uuid in touched}
    except (StageFailed, pynvml.NVMLError) as error:
        return (f"what is left is not known: {error}",)
    lost = [
        f"{before[uuid]}: what is left is not known: it does not answer" for uuid in touched - after.keys()
    ]
    return tuple(
        line
        for gpu in after.values()
        for line in [*differences(gpu, layout_of(before[gpu.uuid])), *_pending_mode(gpu, before[gpu.uuid])]
    ) + tuple(sorted(lost))


def _steps_back(gpu: Gpu, before: Gpu, made: set[tuple[str, Spot | None]]) -> list[Step]:
    was = layout_of(before)
    ours = [
        one
        for one in gpu.instances
        if any(uuid == gpu.uuid and spot is not None and spot.is_at(one) for uuid, spot in made)
        and not any(spot.is_at(one) for spot in was.spots)
    ]
    # Of what was to be destroyed the compute instances may be gone, and the rest in use.
    stripped = [
        one for one in gpu.instances if one.is_orphan and one not in before.instances and one not in ours
    ]
    steps = difference(gpu, was, ours, stripped).steps()
    if (gpu.mig_mode, gpu.mig_pending) == (before.mig_mode, before.mig_pending):
        # A mode that somebody else has asked for, and that waits for a reset, is theirs.
        steps = [step for step in steps if step.do != "mode"]
    return steps


def differences(gpu: Gpu, wanted: GpuLayout) -> list[str]:
    """How `gpu` differs from `wanted`, in words."""
    found = [
        f"{gpu}: {spot} is missing"
        for spot in wanted.spots
        if not any(spot.is_met_by(one) for one in gpu.instances)
    ]
    found += [
        f"{gpu}: {one} at {one.placement} was not there"
        for one in gpu.instances
        if not any(spot.is_at(one) for spot in wanted.spots)
    ]
    if bool(gpu.mig_mode) != wanted.mig:
        found.append(f"{gpu}: MIG mode is {'off' if wanted.mig else 'on'}")
    return found


def _pending_mode(gpu: Gpu, before: Gpu) -> list[str]:
    if gpu.mig_pending == before.mig_pending:
        return []
    return [f"{gpu}: MIG mode goes {'on' if gpu.mig_pending else 'off'} with the next reset"]


def _cause(error: Exception, change: _Change) -> tuple[str, str]:
    if not isinstance(error, pynvml.NVMLError):
        return getattr(error, "kind", "failed"), str(error)
    gpu = change.gpu_of(change.now)
    what = f"{change.now} of {gpu}" if change.now else "reading the layout"
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return "rights", f"{what}: {nvml.describe(error)}; {rights.HOW_TO_GET_THEM}"
    return "failed", f"{what}: {nvml.describe(error)}"


def _find(gpu: Gpu, spot: Spot) -> Instance | None:
    return next((one for one in gpu.instances if spot.is_at(one)), None)


def _compute_size(gpu_instance: Any, profile_id: int) -> int:
    for enum in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gpu_instance, enum, 0)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue
        if info.id == profile_id:
            return int(info.sliceCount)
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
