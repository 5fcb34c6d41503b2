"""The GPUs of a node as text: one line each, with their slices drawn.

GPU 0  H100 80GB HBM3  MIG |3g.40gb_________|1g.10gb|1g.10gb|. . . |  leased to run-1
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.gpu import nvml
from tasks.gpu.instances import Instance
from tasks.gpu.inventory import Gpu, Inventory
from tasks.ledger.leases import Lease

_CELL = 9
"""Columns of one memory slice; names as 1g.10gb with their mark fit in."""


def table(there: Inventory, held: Sequence[Lease]) -> str:
    """One line a GPU; a star marks an instance that is in use."""
    if not there.gpus:
        return there.why
    by_device = {device: lease for lease in held for device in lease.devices}
    width = max(len(_product(gpu)) for gpu in there.gpus)
    lines = [f"{nvml.SIMULATED}, driver {there.driver_version}" if there.simulated else there.describe()]
    lines += [
        f"GPU {gpu.index:<2} {_product(gpu):<{width}}  {gpu.memory_bytes / 2**30:5.0f} GiB  {drawn(gpu)}  "
        f"{_remarks(gpu, by_device)}".rstrip()
        for gpu in there.gpus
    ]
    lines += [f"GPU {index:<2} does not answer: {said}" for index, said in there.lost.items()]
    return "\n".join(lines)


def drawn(gpu: Gpu) -> str:
    """The memory slices of a GPU; of one that is not cut, whether it could be."""
    if not gpu.mig_mode:
        state = "no MIG" if gpu.mig_mode is None else "MIG off"
        return f"|{state + ('*' if gpu.processes else ''):_<{8 * _CELL - 1}}|"
    count = max((p.start + p.size for each in gpu.cut.profiles for p in each.placements), default=8)
    cells: list[str] = []
    place = 0
    while place < count:
        one = next((each for each in gpu.instances if each.placement.start == place), None)
        size = one.placement.size if one else 1
        cells.append(f"{_label(one):{'_' if one else ' '}<{size * _CELL - 1}}"[: size * _CELL - 1])
        place += size
    return f"|{'|'.join(cells)}|"


def document(there: Inventory, held: Sequence[Lease]) -> list[dict[str, Any]]:
    """The same for `--json`."""
    by_device = {device: lease.run_id for lease in held for device in lease.devices}
    return [
        {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "pci": gpu.pci_bus_id,
            "memory_bytes": gpu.memory_bytes,
            "mig": {"current": gpu.mig_mode, "pending": gpu.mig_pending},
            "instances": [
                {
                    "gpu_instance": one.gi,
                    "profile": one.name,
                    "placement": {"start": one.placement.start, "size": one.placement.size},
                    "devices": [part.uuid for part in one.compute],
                    "pids": [process.pid for process in one.processes],
                }
                for one in gpu.instances
            ],
            "pids": [process.pid for process in gpu.processes],
            "nvlink": sorted(_peers(gpu, there)),
            "ailments": list(gpu.ailments),
            "run": by_device.get(gpu.uuid),
        }
        for gpu in there.gpus
    ]


def _peers(gpu: Gpu, there: Inventory) -> list[int]:
    return [other.index for other in there.gpus if frozenset((gpu.uuid, other.uuid)) in there.linked]


def _product(gpu: Gpu) -> str:
    return gpu.name.removeprefix("NVIDIA ")


def _label(one: Instance | None) -> str:
    if one is None:
        return "."
    return one.name + ("!" if one.is_orphan else "*" if one.processes else "")


def _remarks(gpu: Gpu, by_device: Mapping[str, Lease]) -> str:
    lease = by_device.get(gpu.uuid)
    remarks = [f"leased to {lease.run_id}" + (" (over)" if lease.is_over else "")] if lease else []
    if gpu.mig_pending is not None and gpu.mig_pending != gpu.mig_mode:
        remarks.append(f"MIG goes {'on' if gpu.mig_pending else 'off'} with a reset")
    remarks += gpu.ailments
    return "; ".join(remarks)
