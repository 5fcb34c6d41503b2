"""`qwen-pipeline provision --dry-run`: what provision would change on this node now."""

from collections.abc import Iterable
from typing import Any

from tasks.contract import refuse_other_node
from tasks.gpu import demand, inventory, nvml, provision, record, slots
from tasks.gpu.instances import Instance
from tasks.gpu.inventory import Gpu
from tasks.gpu.layouts import Difference, Spot
from tasks.gpu.sizing import Estimate
from tasks.ledger import Ledger, leases
from tasks.settings import Settings
from tasks.spec import CpuLayout, RunSpec


def preview(
    spec: RunSpec, settings: Settings, ledger: Ledger, run_id: str, needs: Estimate | None
) -> tuple[dict[str, Any], str]:
    """As a document (keep, create, destroy: device, profile, placement) and as text.

    Raises:
        InputError, StageFailed, Busy: as provision would.
    """
    refuse_other_node(spec, settings)
    slots.refuse_parallel_workers(spec)
    if isinstance(spec.layout, CpuLayout):
        devices = slots.cpu_devices(spec.layout, inventory.available_cores())
        nothing: dict[str, Any] = {"mode": [], "keep": [], "create": [], "destroy": []}
        document = {
            "node": settings.node,
            "simulated": False,
            "devices": list(devices),
            "notes": [],
            **nothing,
        }
        return document, f"lease {', '.join(devices)}; no GPU is used"
    there = inventory.read(settings)
    own = leases.lease_of(ledger, run_id, settings.node)
    records = record.read(ledger, own.lease_id) if own is not None else {}
    notes: tuple[str, ...] = ()
    if records:
        changes = [records[gpu.uuid].forward(gpu) for gpu in there.gpus if gpu.uuid in records]
    else:
        asked = provision.ask(spec.layout, there, needs)
        notes = asked.notes
        others = (lease for lease in leases.live_leases(ledger, settings.node) if lease.run_id != run_id)
        held = frozenset(device for lease in others for device in lease.devices)
        changes = [taken.difference for taken in demand.pick(asked, there, held)]
    document = {
        "node": settings.node,
        "simulated": there.simulated,
        "devices": [change.gpu.uuid for change in changes],
        "notes": list(notes),
        "mode": [{**_device(one.gpu), "mig": one.mode} for one in changes if one.mode is not None],
        "keep": [_there(one.gpu, each) for one in changes for each in one.keep],
        "create": [
            {**_device(one.gpu), "profile": spot.name, **_place(spot)}
            for one in changes
            for spot in _made(one)
        ],
        "destroy": [_there(one.gpu, each) for one in changes for each in one.destroy],
    }
    return document, "\n".join(_lines(changes, notes, there.simulated))


def _made(change: Difference) -> Iterable[Spot]:
    return [*change.complete, *change.create]


def _device(gpu: Gpu) -> dict[str, Any]:
    return {"device": gpu.uuid, "index": gpu.index}


def _there(gpu: Gpu, instance: Instance) -> dict[str, Any]:
    uuids = [part.uuid for part in instance.compute]
    place = {"start": instance.placement.start, "size": instance.placement.size}
    return {**_device(gpu), "profile": instance.name, "placement": place, "uuids": uuids}


def _place(spot: Spot) -> dict[str, Any]:
    return {"placement": {"start": spot.placement.start, "size": spot.placement.size}}


def _lines(changes: Iterable[Difference], notes: Iterable[str], simulated: bool) -> list[str]:
    lines = [f"{nvml.SIMULATED}"] if simulated else []
    lines += notes
    for change in changes:
        parts = [f"keep {one} at {one.placement}" for one in change.keep]
        parts += [str(step) for step in change.steps()]
        lines.append(f"{change.gpu} ({change.gpu.name}): {'; '.join(parts) or 'nothing to change'}")
    return lines
