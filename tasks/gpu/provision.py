"""Provision: lease the devices that the layout needs, cut GPUs as it says, and hand them on as slots for workers.

Keeps: no device is touched before its lease is in the ledger, and none is leased when no row is left to do; how the
GPUs were cut is recorded before the first change; what already fits is left as it is, and what is in use, or not
this project's, is not destroyed.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

from tasks.contract import Context, Outcome, why_no_pool
from tasks.errors import Busy, InputError, StageError, StageFailed
from tasks.gpu import cutting, demand, inventory, nvml, record, sizing, slots
from tasks.gpu.demand import Demand, GpuLayouts, Taken
from tasks.gpu.inventory import Inventory
from tasks.gpu.sizing import Estimate
from tasks.ledger import leases, quotas
from tasks.ledger.claims import facts_of, writer_of
from tasks.ledger.leases import Lease
from tasks.spec import CpuLayout, TensorParallelLayout

_RENEW_BELOW = 0.5
"""Of the lease's length: with less of it left, a start that takes long could outlive it."""
_POLL_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What differs; for GPUs, `apply` looks again once it holds the lease."""

    satisfied: bool
    reason: str


def plan(context: Context) -> Plan:
    """What this run must lease on this node, and what must change there.

    Raises:
        InputError: this node does not have what the layout asks for.
        StageFailed: a GPU is sick, or a leased device is gone.
        Busy: somebody uses what would have to change.
    """
    spec, node = context.run.spec, context.settings.node
    if (idle := why_no_pool(context)) is not None:
        return Plan(True, f"{idle}, so no device is taken")
    slots.refuse_parallel_workers(spec)
    own = leases.lease_of(context.claim.ledger, context.run.run_id, node)
    there = _devices(context)
    if own is None:
        wanted = _wanted(context, there)
        return Plan(False, f"lease {', '.join(wanted.devices)} of {node}{wanted.changes}")
    _refuse_missing_devices(own, there)
    holds = not own.is_over and own.left_s >= context.settings.lease_s * _RENEW_BELOW
    missing = [] if isinstance(there, tuple) else cutting.missing(context, own, there)
    if holds and not missing:
        return Plan(True, f"this run holds lease {own.lease_id} on {', '.join(own.devices)} already")
    what = "; ".join(missing) if missing else f"on {', '.join(own.devices)}"
    return Plan(False, f"{'mend' if missing else 'renew'} lease {own.lease_id}: {what}")


def apply(plan: Plan, context: Context) -> None:
    """Take the lease, or take it again; then cut the GPUs.

    Raises:
        Busy: other runs hold what it needs, and did not give it back in time; or one is at work on the same batch.
        InputError: it alone wants more than its tenant's quota.
        StageFailed: a change failed; what of it could not be taken back is named. The lease is left to the reaper.
    """
    lease, taken = _take(context)
    if isinstance(context.run.spec.layout, CpuLayout):
        return
    cutting.cut(context, lease, taken or _again(context, lease))
    leases.renew(context.claim, lease.lease_id, context.settings.lease_s)


def verify(context: Context) -> Outcome:
    """The slots, from the lease and the devices that are there.

    Raises:
        StageFailed: the run holds no lease, or a device of it is not there.
    """
    node, layout = context.settings.node, context.run.spec.layout
    facts: dict[str, Any] = {"lease_id": None, "node": node, "simulated": False, "slots": []}
    if (idle := why_no_pool(context)) is not None:
        return Outcome(f"{idle}, so no device is taken", facts)
    lease = leases.lease_of(context.claim.ledger, context.run.run_id, node)
    if lease is None or lease.is_over:
        raise StageFailed(
            f"run {context.run.run_id} has no lease on {node} that holds, right after it took one: is the "
            f"lease time (QWEN_PIPELINE_LEASE_S) too short, or did somebody reap it by force?"
        )
    if isinstance(layout, CpuLayout):
        found = slots.cpu_slots(layout, lease.devices)
        note, label = "; this layout uses no GPU: MIG is left as it is", ""
    else:
        there = inventory.read(context.settings)
        _refuse_missing_devices(lease, there)
        found = _gpu_slots(context, lease, layout, there)
        label = f"{nvml.SIMULATED}: " if there.simulated else ""
        note = "; workers run on CPU cores in their stead" if there.simulated else ""
        facts["simulated"] = there.simulated
    on = ", ".join(lease.devices)
    message = f"{label}lease {lease.lease_id} on {on} of {node}: {len(found)} worker slot(s){note}"
    return Outcome(message, {**facts, "lease_id": lease.lease_id, "slots": found})


def ask(layout: GpuLayouts, there: Inventory, needs: Estimate | None) -> Demand:
    """What the layout asks of the GPUs of this node.

    Raises:
        InputError: it has none, or not those; or `auto` is asked for and nothing is known of the model.
        StageFailed: one is sick.
    """
    if not there.gpus:
        field = next(
            name for name in ("mig", "mig_parted", "tensor_parallel") if name in layout.model_fields_set
        )
        cores = len(inventory.available_cores())
        raise InputError(
            f"layout.{field}: the layout asks for GPUs, and there are none ({there.why}). This node has {cores} CPU "
            f"core(s): `layout: {{cpu: N}}` with N up to {cores} uses those"
        )
    return demand.demand(layout, there, needs)


@dataclass(frozen=True)
class _Wanted:
    devices: tuple[str, ...]
    candidates: tuple[str, ...]
    taken: tuple[Taken, ...] = ()
    changes: str = ""


def _devices(context: Context) -> Inventory | tuple[int, ...]:
    """What is there: GPUs, or for a layout of CPU cores those."""
    if isinstance(context.run.spec.layout, CpuLayout):
        return inventory.available_cores()
    return inventory.read(context.settings)


def _wanted(context: Context, there: Inventory | tuple[int, ...]) -> _Wanted:
    layout, settings = context.run.spec.layout, context.settings
    if isinstance(layout, CpuLayout):
        assert isinstance(there, tuple), "cores were asked for"
        devices = slots.cpu_devices(layout, there)
        return _Wanted(devices, devices)
    assert isinstance(there, Inventory), "GPUs were asked for"
    asked = ask(layout, there, needs_of(context))
    others = [
        lease
        for lease in leases.live_leases(context.claim.ledger, settings.node)
        if lease.run_id != context.run.run_id
    ]
    held = frozenset(device for lease in others for device in lease.devices)
    candidates = tuple(gpu.uuid for gpu in asked.candidates)
    if len(held.intersection(candidates)) > len(candidates) - asked.how_many:
        # Who holds them uses them: what is in use there will be gone, so it is looked at when they are free. Until
        # then the run stands in line for any of them: whoever asks after it must not find one free before it does.
        some = [uuid for uuid in candidates if uuid in held] + [
            uuid for uuid in candidates if uuid not in held
        ]
        return _Wanted(tuple(some[: asked.how_many]), candidates, (), " when other runs have given them back")
    taken = demand.pick(asked, there, held)
    return _Wanted(
        tuple(one.gpu.uuid for one in taken), candidates, taken, cutting.describe(taken, asked.notes)
    )


def _take(context: Context) -> tuple[Lease, tuple[Taken, ...]]:
    """The lease, in order of arrival; waits for other runs as long as the settings say."""
    claim, settings = context.claim, context.settings
    own = leases.lease_of(claim.ledger, claim.run_id, settings.node)
    if own is not None:
        return leases.take(claim, settings.node, own.devices, settings.lease_s), ()
    deadline = time.monotonic() + settings.lease_wait_s
    candidates: tuple[str, ...] | None = None
    while True:
        _refuse_batch_at_work(context)
        there = _devices(context)
        if candidates is None:
            candidates = _all_candidates(context, there)
        wanted = _wanted(context, there)
        _refuse_over_quota(context, len(wanted.devices))
        place = leases.stand_in_line(claim, settings.node, candidates, settings.lease_place_s)
        try:
            tenant = context.run.spec.tenant
            lease = leases.take(
                claim, settings.node, wanted.devices, settings.lease_s, tenant, settings.quota_of(tenant)
            )
            return lease, wanted.taken
        except Busy as busy:
            if time.monotonic() >= deadline:
                behind = f"; this run is number {place.number} in line" if place.number > 1 else ""
                raise Busy(f"{busy}{behind}") from None
            claim.progress(0, 1, "lease", position=place.number, waits_for=str(busy)[:500])
        time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))


def _refuse_batch_at_work(context: Context) -> None:
    """One run writes to a batch at a time: the devices of another one would only wait for it, workers and all."""
    claim = context.claim
    prepared = facts_of(claim.ledger, claim.run_id, "prepare")
    if prepared is None:
        return
    other = writer_of(claim.ledger, prepared["batch_id"])
    if other is None or other.run_id == claim.run_id or other.stage != "run" or other.is_gone:
        return
    leases.leave_line(claim, context.settings.node)
    raise Busy(
        f"run {other.run_id} is at work on the same batch {prepared['batch_id']} (stage {other.stage}, host "
        f"{other.process.host}, pid {other.process.pid}), so this run takes no device yet; try again when it is done"
    )


def _refuse_over_quota(context: Context, wanted: int) -> None:
    """A run that must wait for its own tenant's others leaves the line: it would hold up everybody behind it."""
    claim, settings, tenant = context.claim, context.settings, context.run.spec.tenant
    try:
        quotas.refuse_over_quota(claim, tenant, settings.quota_of(tenant), wanted)
    except StageError:
        leases.leave_line(claim, settings.node)
        raise


def _all_candidates(context: Context, there: Inventory | tuple[int, ...]) -> tuple[str, ...]:
    layout = context.run.spec.layout
    if isinstance(layout, CpuLayout):
        assert isinstance(there, tuple), "cores were asked for"
        return slots.cpu_devices(layout, there)
    assert isinstance(there, Inventory), "GPUs were asked for"
    return tuple(gpu.uuid for gpu in ask(layout, there, needs_of(context)).candidates)


def _again(context: Context, lease: Lease) -> tuple[Taken, ...]:
    """How the GPUs of a lease that is there already are to be cut, for those of which nothing is recorded."""
    layout = context.run.spec.layout
    assert not isinstance(layout, CpuLayout), "cores are not cut"
    there = inventory.read(context.settings)
    undecided = cutting.unrecorded(context, lease, there)
    if not undecided:
        return ()
    sick = [f"{gpu}: {', '.join(gpu.ailments)}" for gpu in undecided if gpu.ailments]
    if sick:
        raise StageFailed(
            f"lease {lease.lease_id} of this run holds a GPU on which nothing should run ({'; '.join(sick)}): end it "
            f"with `qwen-pipeline restore`, then provision again, which leaves that GPU out"
        )
    asked = ask(layout, there, needs_of(context))
    of_lease = tuple(gpu for gpu in asked.candidates if gpu.uuid in lease.devices)
    return demand.pick(replace(asked, candidates=of_lease, how_many=len(of_lease)), there)


def needs_of(context: Context) -> Estimate | None:
    """The memory of a worker, from the release that `convert` made; None before that."""
    release = facts_of(context.claim.ledger, context.run.run_id, "convert")
    return sizing.of_facts(release, context.run.spec.serving) if release is not None else None


def _gpu_slots(context: Context, lease: Lease, layout: GpuLayouts, there: Inventory) -> list[slots.Slot]:
    if isinstance(layout, TensorParallelLayout):
        found = slots.full_gpu_slots(layout, lease.devices, there)
    else:
        found = slots.mig_slots(record.read(context.claim.ledger, lease.lease_id), there)
    return slots.on_cpu(found, inventory.available_cores()) if there.simulated else found


def _refuse_missing_devices(own: Lease, there: Inventory | tuple[int, ...]) -> None:
    known = (
        {gpu.uuid for gpu in there.gpus}
        if isinstance(there, Inventory)
        else {f"cpu:{core}" for core in there}
    )
    gone = sorted(set(own.devices) - known)
    if gone:
        raise StageFailed(
            f"lease {own.lease_id} of this run holds {', '.join(gone)}, which this node does not offer (any "
            f"more): end it with `qwen-pipeline stop` and `restore`, then provision again"
        )
