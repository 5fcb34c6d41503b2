"""The functions of libnvidia-ml that the project calls, over a simulated node: `pynvml.nvmlLib = Library(...)`.

An absent function is NVML_ERROR_FUNCTION_NOT_FOUND, as with an older real library. Here are starting, devices
and their health; `mig.py` has the rest.
"""

import ctypes
import os
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import pynvml

from tasks.gpu.simulated.handles import Handles, Refused, put, referenced
from tasks.gpu.simulated.mig import MigFunctions, mig_device
from tasks.gpu.simulated.products import PRODUCTS
from tasks.gpu.simulated.state import State, StateFile

DRIVER_VERSION = "580.159.04-simulated"

Fault = Callable[[str, int], int | None]
"""From a function's name and the number of the call (from 1) to the error that it ends with, or None."""


class Library(MigFunctions):
    """One process's view of a simulated node."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._handles = Handles()
        self._users = 0
        self._seen = {}
        self._now = file.read()
        self.calls: Counter[str] = Counter()
        """How often each function was called."""
        self.fault: Fault | None = None
        """Asked before each call, for tests."""
        for name in dir(type(self)):
            if name.startswith("nvml"):
                # What pynvml finds under the name: it counts, may fail, and returns an error's number.
                setattr(self, name, _guarded(self, name, getattr(self, name)))

    @property
    def file(self) -> StateFile:
        """Where the node's state is."""
        return self._file

    def enter(self, name: str) -> None:
        """What happens before every call.

        Raises:
            Refused: NVML is not initialised, or a fault is due.
        """
        self.calls[name] += 1
        if self._users < 1 and name not in ("nvmlInitWithFlags", "nvmlErrorString"):
            raise Refused(pynvml.NVML_ERROR_UNINITIALIZED)
        if self.fault is not None and (code := self.fault(name, self.calls.total())) is not None:
            raise Refused(code)
        self._now = self._file.read()
        if self._now["faults"]:
            self._shared_fault(name)
            self._now = self._file.read()

    def nvmlInitWithFlags(self, _flags: Any) -> None:
        self._users += 1
        if self._users == 1:
            self._seen = {}

    def nvmlShutdown(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._handles.forget()
            self._seen = {}

    def nvmlErrorString(self, code: Any) -> bytes:
        names = {19: b"In use by another client", 20: b"Insufficient Memory", 23: b"Insufficient Resources"}
        return names.get(int(code), f"error {int(code)}".encode())

    def nvmlSystemGetDriverVersion(self, buffer: Any, _length: Any) -> None:
        buffer.value = DRIVER_VERSION.encode()

    def nvmlSystemGetCudaDriverVersion(self, version: Any) -> None:
        put(version, 13000)

    def nvmlSystemGetProcessName(self, pid: Any, buffer: Any, _length: Any) -> None:
        for gpu in self._now["gpus"]:
            for process in gpu["processes"]:
                if process["pid"] == int(getattr(pid, "value", pid)):
                    buffer.value = process["name"].encode()
                    return
        raise Refused(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetCount_v2(self, count: Any) -> None:
        put(count, len(self._now["gpus"]))

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        if not 0 <= index.value < len(self._now["gpus"]):
            raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self._gpu(("gpu", index.value))
        self._handles.put(handle, ("gpu", index.value))

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> None:
        wanted = uuid.value.decode()
        for gpu in self._now["gpus"]:
            if gpu["uuid"] == wanted:
                self._gpu(("gpu", gpu["index"]))
                return self._handles.put(handle, ("gpu", gpu["index"]))
            for instance in gpu["instances"]:
                for compute in instance["compute"]:
                    if compute["uuid"] == wanted:
                        return self._handles.put(handle, mig_device(gpu, instance, compute))
        raise Refused(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, _length: Any) -> None:
        thing = self._handles.thing(handle, "gpu", "mig")
        name = PRODUCTS[self._now["product"]].name
        of_mig = f" MIG device {thing[2]}.{thing[3]}" if thing[0] == "mig" else ""
        buffer.value = f"{name}{of_mig} (simulated)".encode()

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, _length: Any) -> None:
        thing = self._handles.thing(handle, "gpu", "mig")
        uuid = thing[4] if thing[0] == "mig" else self._gpu(thing)["uuid"]
        buffer.value = uuid.encode()

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        found = referenced(info)
        found.bus, found.pciDeviceId = gpu["bus"], PRODUCTS[self._now["product"]].pci_device_id
        found.busId = f"00000000:{gpu['bus']:02X}:00.0".encode()

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:
        thing = self._handles.thing(handle, "gpu", "mig")
        gpu = self._gpu(thing)
        product = PRODUCTS[self._now["product"]]
        total_mb, reserved = product.memory_mb, product.reserved_bytes
        processes = gpu["processes"]
        if thing[0] == "mig":
            total_mb = self._profile(gpu, self._instance(gpu, thing[2])["profile_id"]).memory_mb
            processes, reserved = [each for each in processes if each["gi"] == thing[2]], 0
        used = reserved + (sum(each["memory_mb"] for each in processes) << 20)
        found = referenced(memory)
        found.total, found.used, found.free = total_mb << 20, used, (total_mb << 20) - used

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, infos: Any) -> int | None:
        thing = self._handles.thing(handle, "gpu", "mig")
        gpu = self._gpu(thing)
        found = gpu["processes"]
        if thing[0] == "mig":
            found = [each for each in found if (each["gi"], each["ci"]) == thing[2:4]]
        elif gpu["mig"] and not self._may_change(self._now):
            raise Refused(pynvml.NVML_ERROR_NO_PERMISSION)
        room, referenced(count).value = referenced(count).value, len(found)
        if not found:
            return None
        if infos is None or room < len(found):
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for info, process in zip(infos, found, strict=False):
            info.pid, info.usedGpuMemory = process["pid"], process["memory_mb"] << 20
            info.gpuInstanceId = 0xFFFFFFFF if process["gi"] is None else process["gi"]
            info.computeInstanceId = 0xFFFFFFFF if process["ci"] is None else process["ci"]
        return None

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, what: Any, status: Any) -> None:
        gpu = self._gpu(self._handles.thing(one, "gpu"))
        peer = self._handles.thing(other, "gpu")[1]
        linked = what == pynvml.NVML_P2P_CAPS_INDEX_NVLINK and peer in gpu["peers"] and not gpu["mig"]
        put(status, pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, _counter: Any, count: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        uncorrected = kind.value == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        put(count, gpu["ecc_uncorrected"] if uncorrected else 0)

    def nvmlDeviceGetRemappedRows(
        self, handle: Any, corrected: Any, uncorrected: Any, pending: Any, failed: Any
    ) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        for reference, value in (
            (corrected, 0),
            (uncorrected, int(gpu["remap_pending"])),
            (pending, int(gpu["remap_pending"])),
            (failed, int(gpu["remap_failed"])),
        ):
            put(reference, value)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: Any, pending: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        if not gpu["retire_pending"]:
            raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)  # as an H200 answers
        put(pending, 1)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, reasons: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        idle = 0 if gpu["processes"] else pynvml.nvmlClocksEventReasonGpuIdle
        put(reasons, gpu["throttle"] or idle)

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Any, info: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        if not PRODUCTS[self._now["product"]].has_fabric:
            raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
        referenced(info).state, referenced(info).status = gpu["fabric_state"], 0

    def nvmlDeviceGetFieldValues(self, handle: Any, _count: Any, values: Any) -> None:
        gpu = self._gpu(self._handles.thing(handle, "gpu"))
        known = {
            pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED: int(PRODUCTS[self._now["product"]].resetless),
            pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: gpu["recovery_action"],
        }
        for value in referenced(values):
            value.nvmlReturn = 0 if value.fieldId in known else pynvml.NVML_ERROR_NOT_SUPPORTED
            value.value.uiVal = known.get(value.fieldId, 0)

    def may_change(self) -> bool:
        """Whether this process has the rights of root, as far as the node asks for them."""
        return self._may_change(self._file.read())

    def _shared_fault(self, name: str) -> None:
        with self._file.changing() as state:
            for fault in state["faults"]:
                if fault["function"] != name or fault["times"] == 0:
                    continue
                fault["nth"] -= 1
                if fault["nth"] <= 0:
                    fault["times"] -= 1
                    due = int(fault["error"])
                    break
            else:
                return
        raise Refused(due)

    def _may_change(self, state: State) -> bool:
        return not state["needs_root"] or os.environ.get("QWEN_PIPELINE_NVML_AS_ROOT") == "1"


def _guarded(library: Library, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            library.enter(name)
            result = function(*arguments)
        except Refused as refused:
            return refused.code
        return pynvml.NVML_SUCCESS if result is None else result

    # pynvml tells ctypes what some functions return.
    call.restype = ctypes.c_int  # type: ignore[attr-defined]
    return call
