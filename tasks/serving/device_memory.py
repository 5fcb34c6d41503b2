"""The memory of a worker's devices: what is used, by whom, and whether it came back.

A number alone says little on a shared node, so "back" means: none of our processes is on the device, and what
is used is what was used before, within a tolerance; who else is there is named. Where there is no driver, or a
simulated one (no worker can use it), there is nothing to look at and every answer is empty.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.serving.launch import Slot
from tasks.settings import Settings

_POLL_S = 0.2
_GIB = 1 << 30
_FELL_BY = 0.5
"""Part of a ready worker's memory without which it cannot serve: its weights alone are more."""


@dataclass(frozen=True)
class Use:
    """One device at one moment."""

    name: str
    used_bytes: int
    pids: tuple[int, ...]
    """Of processes with a context on it; on a node of containers they may be another namespace's."""


def read(uuids: Iterable[str], settings: Settings) -> dict[str, Use]:
    """Each device's use; a device that cannot be read is left out."""
    wanted = list(uuids)
    if not wanted or settings.nvml != "driver":
        return {}
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        return {uuid: use for uuid in wanted if (use := _use(pynvml, uuid)) is not None}
    finally:
        pynvml.nvmlShutdown()


def used_bytes(slot: Slot, settings: Settings) -> int:
    """Used on all devices of the slot; 0 for a slot without devices."""
    return sum(use.used_bytes for use in read(slot.uuids, settings).values())


def kind(slot: Slot, settings: Settings) -> str:
    """What its devices are called, as `NVIDIA H200`; `cpu` for a slot without."""
    names = {use.name for use in read(slot.uuids, settings).values()}
    return "-".join(sorted(names)) or ("gpu" if slot.uuids else "cpu")


def missing(slot: Slot, ready_bytes: int, settings: Settings) -> str:
    """What says that a worker lost its memory since it was ready; empty when nothing does."""
    if ready_bytes == 0:
        return ""
    now = read(slot.uuids, settings)
    used = sum(use.used_bytes for use in now.values())
    if not now or used >= ready_bytes * _FELL_BY:
        return ""
    return f"its GPU memory fell from {ready_bytes / _GIB:.1f} to {used / _GIB:.1f} GiB"


def wait_until_back(before: Mapping[str, int], settings: Settings, wait_s: float) -> tuple[str, bool]:
    """Wait until the devices' memory is as `before` (UUID to bytes) within the tolerance.

    Returns what differs in the end, empty when nothing does; and whether the driver names who is on all those
    devices.
    """
    deadline = time.monotonic() + wait_s
    while True:
        now = read(before, settings)
        more = {
            uuid: use
            for uuid, use in now.items()
            if use.used_bytes > before[uuid] + settings.memory_tolerance_mb * 2**20
        }
        if not more:
            return "", False
        if time.monotonic() > deadline:
            differs = "; ".join(_describe(uuid, use, before[uuid]) for uuid, use in more.items())
            return differs, all(use.pids for use in more.values())
        time.sleep(_POLL_S)


def _describe(uuid: str, use: Use, before: int) -> str:
    who = ", ".join(f"pid {pid} ({_title(pid)})" for pid in use.pids) or "no process that the driver names"
    return f"{uuid} uses {use.used_bytes / _GIB:.2f} GiB, {before / _GIB:.2f} GiB before; on it: {who}"


def _title(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return "of another container"


def _use(pynvml: Any, uuid: str) -> Use | None:
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        name = pynvml.nvmlDeviceGetName(handle)
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except pynvml.NVMLError:
        return None
    try:
        pids = tuple(int(one.pid) for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except pynvml.NVMLError:  # not told for a MIG device by some drivers
        pids = ()
    return Use(name if isinstance(name, str) else name.decode(), used, pids)
