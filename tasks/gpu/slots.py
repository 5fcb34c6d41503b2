"""From the devices of a lease to what each worker gets. Pure: it asks nobody and changes nothing.

A slot is described by a plain mapping, because it travels as a fact from `provision` to `start`:

    {"slot_id": "cpu-0", "kind": "cpu", "cores": [0]}
    {"slot_id": "gpus-0", "kind": "gpus", "uuids": ["GPU-..."]}
    {"slot_id": "mig-0", "kind": "mig", "uuid": "MIG-...", "gpu": "GPU-...", "profile": "3g.40gb"}

On a simulated node a worker runs on CPU cores, and `stands_for` holds the slot that it would have had.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tasks.errors import InputError, StageFailed
from tasks.gpu import demand
from tasks.gpu.inventory import Inventory
from tasks.gpu.record import Record
from tasks.spec import CpuLayout, RunSpec, TensorParallelLayout

Slot = dict[str, Any]

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")


def cpu_devices(layout: CpuLayout, cores: Sequence[int]) -> tuple[str, ...]:
    """The devices to lease, as `cpu:CORE`: all of them, because more cores than workers make each worker faster.

    Raises:
        InputError: there are fewer cores than workers.
    """
    if layout.cpu > len(cores):
        raise InputError(
            f"layout.cpu: {layout.cpu} workers need as many cores, and this process may use {len(cores)}; ask for "
            f"{len(cores)} or fewer"
        )
    return tuple(f"cpu:{core}" for core in cores)


def cpu_slots(layout: CpuLayout, devices: Sequence[str]) -> list[Slot]:
    """Cores split evenly: with 5, 2 workers get 3 and 2. Neighbours stay together, because they share caches."""
    cores = sorted(int(device.removeprefix("cpu:")) for device in devices)
    return [
        {"slot_id": f"cpu-{number}", "kind": "cpu", "cores": part}
        for number, part in enumerate(_split(cores, layout.cpu))
    ]


def full_gpu_slots(layout: TensorParallelLayout, uuids: Sequence[str], there: Inventory) -> list[Slot]:
    """One for each group of GPUs; a group shares NVLink where that is possible."""
    grouped = demand.groups(uuids, layout.tensor_parallel, there)
    return [
        {"slot_id": f"gpus-{number}", "kind": "gpus", "uuids": list(group)}
        for number, group in enumerate(grouped)
    ]


def mig_slots(records: Mapping[str, Record], there: Inventory) -> list[Slot]:
    """One for each MIG device that the lease uses, in order of GPU and place.

    Raises:
        StageFailed: one of them is not there.
    """
    slots: list[Slot] = []
    for gpu in there.gpus:
        if gpu.uuid not in records:
            continue
        for spot in sorted(records[gpu.uuid].target.spots):
            device = next((one for one in gpu.instances if spot.is_met_by(one)), None)
            if device is None:
                raise StageFailed(f"{spot} is not on {gpu} (any more): provision again")
            place = {"gpu": gpu.uuid, "profile": device.name}
            uuid = device.compute[0].uuid
            slots.append({"slot_id": f"mig-{len(slots)}", "kind": "mig", "uuid": uuid, **place})
    return slots


def on_cpu(slots: Sequence[Slot], cores: Sequence[int]) -> list[Slot]:
    """For a simulated node: the same slots, each on its part of the CPU cores. More slots than cores share them."""
    parts = _split(list(cores), len(slots)) if len(slots) <= len(cores) else [[core] for core in cores]
    return [
        {"slot_id": slot["slot_id"], "kind": "cpu", "cores": parts[number % len(parts)], "stands_for": slot}
        for number, slot in enumerate(slots)
    ]


def refuse_parallel_workers(spec: RunSpec) -> None:
    """A MIG device is served by one worker alone.

    Raises:
        InputError: `serving.extra_args` asks for more.
    """
    if isinstance(spec.layout, (CpuLayout, TensorParallelLayout)):
        return
    for name, value in spec.serving.extra_args.items():
        if name.lstrip("-").replace("-", "_") in _PARALLEL and value != 1:
            raise InputError(
                f"serving.extra_args.{name}: a MIG device is served by one worker alone, because NVIDIA does not "
                f"support NCCL between MIG devices; remove it, or use full GPUs with layout.tensor_parallel"
            )


def _split(cores: Sequence[int], parts: int) -> list[list[int]]:
    each, more = divmod(len(cores), parts)
    ends = [number * each + min(number, more) for number in range(parts + 1)]
    return [list(cores[begin:end]) for begin, end in pairwise(ends)]
