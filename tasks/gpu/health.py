"""What makes a GPU one on which nothing should run: read before it is leased, so that a sick one is left out.

Every question may be one that a product or driver does not know; then it is not held against the GPU.
"""

import ctypes
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pynvml

from tasks.gpu import nvml
from tasks.settings import Settings

log = logging.getLogger(__name__)

_CRITICAL_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fell off the bus",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""NVIDIA's Xid catalogue: those that a reset or a repair must follow. Faults of applications are not here."""

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")

_UNHEALTHY_CLOCKS = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "too hot, slowed down by hardware",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}


def ailments(handle: Any) -> Iterator[str]:
    """Why nothing should run on this GPU, as the driver tells now."""
    if _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, _UNCORRECTED, pynvml.NVML_VOLATILE_ECC):
        yield "uncorrected ECC errors since its last reset"
    _corrected, _uncorrected, pending, failed = _ask(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    if failed:
        yield "row remapping failed: it needs repair"
    elif pending:
        yield "rows wait to be remapped: reset it"
    if _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        yield "pages wait to be retired: reset it"
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    for name, what in _UNHEALTHY_CLOCKS.items():
        if reasons & getattr(pynvml, name):
            yield what
    if (action := _recovery_action(handle)) != pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
        yield f"the driver asks for {_ACTIONS.get(action, f'recovery action {action}')}"
    if (state := _fabric_state(handle)) in _FABRIC:
        yield f"its NVLink fabric is not ready ({_FABRIC[state]}): is nvidia-fabricmanager running?"


def critical_xids(settings: Settings, bus_ids: Sequence[str]) -> dict[str, list[str]]:
    """By PCI bus id: Xids of this boot after which nothing should run; from the kernel's log, where it is readable."""
    found: dict[str, list[str]] = {}
    for line in _kernel_log(settings):
        xid = _XID.search(line)
        if xid is None or int(xid[2]) not in _CRITICAL_XIDS:
            continue
        for bus_id in bus_ids:
            # The kernel writes 0000:07:00, NVML 00000000:07:00.0.
            if bus_id.lower().removesuffix(".0").endswith(xid[1].lower()):
                what = f"Xid {xid[2]} ({_CRITICAL_XIDS[int(xid[2])]}) since boot"
                if what not in found.setdefault(bus_id, []):
                    found[bus_id].append(what)
    return found


_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
_ACTIONS = {
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "a reset",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "a reboot",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "draining its peers",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "draining and a reset",
}
_FABRIC = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "not started",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "in progress",
}


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return question(*arguments)
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_InvalidArgument,
        pynvml.NVMLLibraryMismatchError,
    ):
        return None


def _recovery_action(handle: Any) -> int:
    values = _ask(pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return int(values[0].value.uiVal) if values and values[0].nvmlReturn == pynvml.NVML_SUCCESS else 0


def _fabric_state(handle: Any) -> int:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    if _ask(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)) is None:
        return int(pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)
    return int(info.state)


def _kernel_log(settings: Settings) -> list[str]:
    library = nvml.simulation(settings)
    if library is not None:
        return [str(line) for line in library.file.read()["kernel_log"]]
    lines = []
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        log.info("Xids since boot are not known: /dev/kmsg cannot be read (%s)", error.strerror)
        return []
    try:
        with suppress(BlockingIOError, BrokenPipeError):
            while True:
                lines.append(os.read(descriptor, 8192).decode(errors="replace"))
    finally:
        os.close(descriptor)
    return lines
