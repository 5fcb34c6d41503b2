"""From a layout to what each worker gets. Pure: it asks nobody and changes nothing.

A slot is described by a plain mapping, because it travels as a fact from `provision` to `start`:

    {"slot_id": "cpu-0", "kind": "cpu", "cores": [0]}
    {"slot_id": "gpus-0", "kind": "gpus", "uuids": ["GPU-..."]}
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tasks.errors import Busy, InputError, StageFailed
from tasks.gpu.inventory import Gpu, Inventory
from tasks.spec import CpuLayout, Layout, MigLayout, TensorParallelLayout

Slot = dict[str, Any]


def devices_for(
    layout: Layout, inventory: Inventory, cores: Sequence[int], taken: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """The devices to lease for `layout`: `cpu:CORE`, or UUIDs of GPUs.

    Args:
        cores: what this process may use.
        taken: devices that other runs hold; a layout that leaves the choice open avoids them.

    Raises:
        InputError: the node does not have what the layout asks for.
        StageFailed: the layout is possible, but not in this version.
        Busy: enough devices exist, but others hold them.
    """
    if isinstance(layout, CpuLayout):
        if layout.cpu > len(cores):
            raise InputError(
                f"layout.cpu: {layout.cpu} workers need as many cores, and this process may use "
                f"{len(cores)}; ask for {len(cores)} or fewer"
            )
        # All of them: more cores than workers make each worker faster.
        return tuple(f"cpu:{core}" for core in cores)
    if not inventory.gpus:
        field = "mig" if isinstance(layout, MigLayout) else "tensor_parallel"
        raise InputError(
            f"layout.{field}: the layout asks for GPUs, and there are none ({inventory.why}). This node has "
            f"{len(cores)} CPU core(s): `layout: {{cpu: N}}` with N up to {len(cores)} uses those"
        )
    if isinstance(layout, MigLayout):
        raise StageFailed(
            "layout.mig: cutting GPUs with MIG is not in this version yet; `layout: {tensor_parallel: 1}` "
            "uses full GPUs"
        )
    return tuple(gpu.uuid for gpu in _full_gpus(layout, inventory, taken))


def slots_of(layout: Layout, devices: Sequence[str]) -> list[Slot]:
    """One slot a worker, from the devices that the run has leased.

    Cores are split evenly: with 5 cores, 2 workers get 3 and 2. Neighbours stay together, because they share
    caches.
    """
    if isinstance(layout, CpuLayout):
        cores = sorted(int(device.removeprefix("cpu:")) for device in devices)
        return [
            {"slot_id": f"cpu-{number}", "kind": "cpu", "cores": part}
            for number, part in enumerate(_split(cores, layout.cpu))
        ]
    if isinstance(layout, TensorParallelLayout):
        size = layout.tensor_parallel
        return [
            {"slot_id": f"gpus-{start // size}", "kind": "gpus", "uuids": list(devices[start : start + size])}
            for start in range(0, len(devices), size)
        ]
    raise StageFailed("layout.mig: cutting GPUs with MIG is not in this version yet")


def _full_gpus(layout: TensorParallelLayout, inventory: Inventory, taken: frozenset[str]) -> Sequence[Gpu]:
    chosen = _chosen(layout, inventory, taken)
    if len(chosen) % layout.tensor_parallel:
        raise InputError(
            f"layout.gpus: {len(chosen)} GPU(s) cannot be grouped by {layout.tensor_parallel} "
            f"(layout.tensor_parallel) without a remainder"
        )
    cut = [str(gpu.index) for gpu in chosen if gpu.mig_mode]
    if cut:
        raise StageFailed(
            f"layout.tensor_parallel: full GPUs need MIG off, and it is on for GPU {', '.join(cut)}; "
            f"switching it is not in this version yet: `nvidia-smi -i INDEX -mig 0`, or choose others with "
            f"layout.gpus"
        )
    return chosen


def _chosen(layout: TensorParallelLayout, inventory: Inventory, taken: frozenset[str]) -> Sequence[Gpu]:
    there = inventory.gpus
    if layout.gpus == "all":
        return there
    if isinstance(layout.gpus, list):
        missing = sorted(set(layout.gpus) - {gpu.index for gpu in there})
        if missing:
            raise InputError(
                f"layout.gpus: there is no GPU {', '.join(map(str, missing))} on this node; it has "
                f"{', '.join(str(gpu.index) for gpu in there)}"
            )
        return [gpu for gpu in there if gpu.index in layout.gpus]
    if layout.gpus > len(there):
        raise InputError(f"layout.gpus: {layout.gpus} GPUs are asked for, and this node has {len(there)}")
    free = [gpu for gpu in there if gpu.uuid not in taken]
    if layout.gpus > len(free):
        raise Busy(
            f"{layout.gpus} GPUs are asked for (layout.gpus), and {len(free)} of {len(there)} are not leased "
            f"to another run; try again when one has ended (`qwen-pipeline status` shows them)"
        )
    return free[: layout.gpus]


def _split(cores: Sequence[int], parts: int) -> list[list[int]]:
    each, more = divmod(len(cores), parts)
    ends = [number * each + min(number, more) for number in range(parts + 1)]
    return [list(cores[begin:end]) for begin, end in pairwise(ends)]
