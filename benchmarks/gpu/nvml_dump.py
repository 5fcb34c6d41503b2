"""All that NVML tells of one GPU without being asked to change anything, for the simulator to be compared.

Every call is a getter. What a call refuses is kept as the name of its error: that is an answer too. Identities
of the card (UUID, serial, PCI address) are left out.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.kit import gpu_index, nvml

_PLAIN = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetBrand",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetMemoryBusWidth",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceIsMigDeviceHandle",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetVirtualizationMode",
    "nvmlDeviceGetMultiGpuBoard",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRowRemapperHistogram",
    "nvmlDeviceGetGpuOperationMode",
    "nvmlDeviceGetVbiosVersion",
    "nvmlDeviceGetInforomImageVersion",
    "nvmlDeviceGetAttributes_v2",
    "nvmlDeviceGetBAR1MemoryInfo",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
)


def dump() -> dict[str, Any]:
    """The dump.

    Raises:
        SystemExit: there is no GPU.
    """
    with nvml() as handle:
        if handle is None:
            raise SystemExit("there is no NVIDIA driver here")
        import pynvml

        return {
            "system": {
                name: _ask(_named, name)
                for name in (
                    "nvmlSystemGetDriverVersion",
                    "nvmlSystemGetCudaDriverVersion",
                    "nvmlSystemGetNVMLVersion",
                    "nvmlDeviceGetCount",
                )
            },
            "device": {name: _ask(_named, name, handle) for name in _PLAIN},
            "memory_info_v2": _ask(
                lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            ),
            "clocks_mhz": {
                kind: {
                    "now": _ask(_clocks, "nvmlDeviceGetClockInfo", handle, kind),
                    "most": _ask(_clocks, "nvmlDeviceGetMaxClockInfo", handle, kind),
                }
                for kind in ("GRAPHICS", "SM", "MEM", "VIDEO")
            },
            "asked_by_the_project": _asked(handle),
            "gpu_instance_profiles": _profiles(handle),
            "gpu_instances": _instances(handle),
            "mig_device_0": _ask(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)),
        }


def _asked(handle: Any) -> dict[str, Any]:
    """What the inventory and the health checks ask with arguments."""
    import pynvml

    def fabric() -> Any:
        info = pynvml.c_nvmlGpuFabricInfo_v2_t()
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(info))
        return {"state": info.state, "status": info.status}

    def field(number: int) -> Any:
        value = pynvml.nvmlDeviceGetFieldValues(handle, [number])[0]
        if value.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(value.nvmlReturn)
        return value.value.uiVal

    def peer() -> Any:
        other = pynvml.nvmlDeviceGetHandleByIndex(1 - gpu_index())
        return pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)

    return {
        "pci_device_id": _ask(lambda: f"0x{pynvml.nvmlDeviceGetPciInfo(handle).pciDeviceId:08X}"),
        "uncorrected_ecc_errors": _ask(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        ),
        "recovery_action": _ask(field, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
        "resetless_mig": _ask(field, pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED),
        "fabric": _ask(fabric),
        "nvlink_to_the_other_gpu": _ask(peer),
    }


def _profiles(handle: Any) -> list[dict[str, Any]]:
    """Every GPU instance profile that the library has a number for."""
    import pynvml

    found = []
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        profile: dict[str, Any] = {
            "profile": number,
            "constant": _constant(number),
            "info": _ask(_named, "nvmlDeviceGetGpuInstanceProfileInfo", handle, number),
            "info_v2": _ask(_named, "nvmlDeviceGetGpuInstanceProfileInfoV", handle, number, 2),
        }
        info = profile["info"]
        if isinstance(info, dict) and "id" in info:
            profile["placements"] = _ask(_placements, handle, info["id"])
            profile["remaining_capacity"] = _ask(
                _named, "nvmlDeviceGetGpuInstanceRemainingCapacity", handle, info["id"]
            )
        found.append(profile)
    return found


def _placements(handle: Any, profile_id: int) -> list[Any]:
    """Where an instance of the profile may lie, as memory slices (start, size); a card without MIG on may refuse."""
    import pynvml

    count = pynvml.c_uint(0)
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, pynvml.byref(count))
    array = (pynvml.c_nvmlGpuInstancePlacement_t * max(1, count.value))()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, array, pynvml.byref(count))
    return sorted([one.start, one.size] for one in array[: count.value])


def _instances(handle: Any) -> Any:
    import pynvml

    def ask() -> Any:
        total = []
        for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
            except pynvml.NVMLError:
                continue
            count = pynvml.c_uint(0)
            array = (pynvml.c_nvmlGpuInstance_t * max(1, info.instanceCount))()
            pynvml.nvmlDeviceGetGpuInstances(handle, info.id, array, pynvml.byref(count))
            total.append({"profile": number, "count": count.value})
        return total

    return _ask(ask)


def _constant(number: int) -> str:
    import pynvml

    prefix = "NVML_GPU_INSTANCE_PROFILE_"
    names = [name for name in dir(pynvml) if name.startswith(prefix) and name != f"{prefix}COUNT"]
    return next((name for name in names if getattr(pynvml, name) == number), "?")


def _named(name: str, *arguments: Any) -> Any:
    import pynvml

    return getattr(pynvml, name)(*arguments)


def _clocks(name: str, handle: Any, kind: str) -> Any:
    import pynvml

    return _named(name, handle, getattr(pynvml, f"NVML_CLOCK_{kind}"))


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer as JSON can hold it, or how it was refused."""
    import pynvml

    try:
        return _plain(call(*arguments))
    except pynvml.NVMLError as error:
        return {"error": type(error).__name__, "says": str(error)}
    except (AttributeError, TypeError, ValueError, OSError) as error:
        return {"error": type(error).__name__, "says": str(error)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    fields = getattr(value, "_fields_", None)
    if fields is not None:
        return {field[0]: _plain(getattr(value, field[0])) for field in fields}
    if hasattr(value, "_length_"):
        return [_plain(one) for one in value]
    if hasattr(value, "__dict__"):
        return {name: _plain(one) for name, one in vars(value).items()}
    return str(value)
