"""Provision: lease the devices that the layout needs, and lay them out as slots for workers.

Keeps: no device is touched before its lease is in the ledger, and none is leased when no row is left to do.
In this version nothing is laid out: CPU cores and full GPUs are used as they are, and a layout that needs
MIG is refused.
"""

from dataclasses import dataclass
from typing import Any

from tasks.contract import Context, Outcome
from tasks.errors import InputError, StageFailed
from tasks.gpu import inventory
from tasks.gpu.slots import devices_for, slots_of
from tasks.ledger import leases
from tasks.ledger.claims import facts_of
from tasks.ledger.leases import Lease
from tasks.settings import Settings
from tasks.spec import CpuLayout, RunSpec

_RENEW_BELOW = 0.5
"""Of the lease's length: with less of it left, a start that takes long could outlive it."""


@dataclass(frozen=True)
class Plan:
    """The devices to hold; none when nothing is to do."""

    satisfied: bool
    reason: str
    devices: tuple[str, ...] = ()


def plan(context: Context) -> Plan:
    """What this run must lease on this node.

    Raises:
        InputError: this is not the spec's node, or it does not have what the layout asks for.
        StageFailed: the layout is not possible in this version, or a leased device is gone.
        Busy: the layout leaves the choice of GPUs open, and too few are free.
    """
    refuse_other_node(context.run.spec, context.settings)
    if _nothing_to_serve(context):
        return Plan(True, "no row is left to do, so no device is taken")
    node, layout = context.settings.node, context.run.spec.layout
    there, cores = inventory.read(context.settings), inventory.available_cores()
    own = leases.lease_of(context.claim.ledger, context.run.run_id, node)
    if own is not None:
        _refuse_missing_devices(own, {*(gpu.uuid for gpu in there.gpus), *(f"cpu:{core}" for core in cores)})
        if not own.is_over and own.left_s >= context.settings.lease_s * _RENEW_BELOW:
            return Plan(True, f"this run holds lease {own.lease_id} on {', '.join(own.devices)} already")
        return Plan(False, f"renew lease {own.lease_id} on {', '.join(own.devices)}", own.devices)
    others = leases.live_leases(context.claim.ledger, node)
    taken = frozenset(device for lease in others for device in lease.devices)
    devices = devices_for(layout, there, cores, taken)
    return Plan(False, f"lease {', '.join(devices)} of {node}", devices)


def apply(plan: Plan, context: Context) -> None:
    """Take the lease, or take it again.

    Raises:
        Busy: another run holds a device; the message names it and when its lease expires.
    """
    leases.take(context.claim, context.settings.node, plan.devices, context.settings.lease_s)


def verify(context: Context) -> Outcome:
    """The slots, from the lease that the ledger holds.

    Raises:
        StageFailed: the run holds no lease.
    """
    node = context.settings.node
    facts: dict[str, Any] = {"lease_id": None, "node": node, "simulated": False, "slots": []}
    if _nothing_to_serve(context):
        return Outcome("no row is left to do, so no device is taken", facts)
    lease = leases.lease_of(context.claim.ledger, context.run.run_id, node)
    if lease is None or lease.is_over:
        raise StageFailed(
            f"run {context.run.run_id} has no lease on {node} that holds, right after it took one: is the "
            f"lease time (QWEN_PIPELINE_LEASE_S) too short, or did somebody reap it by force?"
        )
    layout = context.run.spec.layout
    slots = slots_of(layout, lease.devices)
    message = f"lease {lease.lease_id} on {', '.join(lease.devices)} of {node}: {len(slots)} worker slot(s)"
    if isinstance(layout, CpuLayout):
        message += "; this layout uses no GPU: MIG is left as it is"
    return Outcome(message, {**facts, "lease_id": lease.lease_id, "slots": slots})


def refuse_other_node(spec: RunSpec, settings: Settings) -> None:
    """Devices are leased and given back on their own node only.

    Raises:
        InputError: this host is another one than the spec names.
    """
    if spec.node != settings.node:
        raise InputError(
            f"node: the spec asks for {spec.node!r}, and this host is {settings.node!r} "
            f"(QWEN_PIPELINE_NODE): execute this stage there, or change the spec"
        )


def _nothing_to_serve(context: Context) -> bool:
    prepared = facts_of(context.claim.ledger, context.run.run_id, "prepare")
    return prepared is not None and prepared["to_do"] == 0


def _refuse_missing_devices(own: Lease, there: set[str]) -> None:
    gone = sorted(set(own.devices) - there)
    if gone:
        raise StageFailed(
            f"lease {own.lease_id} of this run holds {', '.join(gone)}, which this node does not offer (any "
            f"more): end it with `qwen-pipeline stop` and `restore`, then provision again"
        )
