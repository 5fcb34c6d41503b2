"""The GPUs of a lease, cut as recorded and brought back as they were.

Keeps: recorded first, then changed; a change that fails is taken back, or what is left of it is recorded and the
lease stays; the world is read anew after each change.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from tasks.contract import Context
from tasks.errors import Busy, StageError, StageFailed
from tasks.gpu import inventory, nvml, privileged, record
from tasks.gpu.change import Report
from tasks.gpu.demand import Taken
from tasks.gpu.inventory import Gpu, Inventory
from tasks.gpu.layouts import Difference
from tasks.gpu.record import Record
from tasks.ledger import Claim
from tasks.ledger.leases import Lease
from tasks.settings import Settings

log = logging.getLogger(__name__)


class ResetRequired(StageFailed):
    """MIG mode changes only with a reset or a reboot, which this project does not do; the message says how."""


class NoRights(StageFailed):
    """This process may not change GPUs; the message says what is missing."""


def describe(taken: Sequence[Taken], notes: Sequence[str] = ()) -> str:
    """What changes, in one line."""
    parts = list(notes)
    for one in taken:
        change = one.difference
        if not change.is_empty:
            steps = ", ".join(str(step) for step in change.steps())
            parts.append(f"{one.gpu}: {steps} (keeping {len(change.keep)})")
    return "".join(f"; {part}" for part in parts)


def unrecorded(context: Context, lease: Lease, there: Inventory) -> list[Gpu]:
    """GPUs of the lease whose layout is not recorded, or is of before a reboot."""
    known, boot = record.read(context.claim.ledger, lease.lease_id), nvml.boot_id(context.settings)
    return [
        gpu
        for gpu in there.gpus
        if gpu.uuid in lease.devices
        and (gpu.uuid not in known or known[gpu.uuid].boot_id != boot or known[gpu.uuid].restored)
    ]


def missing(context: Context, lease: Lease, there: Inventory) -> list[str]:
    """What of the lease's layout is not there, in words."""
    found = [f"the layout of {gpu} is not decided" for gpu in unrecorded(context, lease, there)]
    if found:
        return found
    for each, gpu in _of_lease(record.read(context.claim.ledger, lease.lease_id), there):
        found += [f"{gpu}: {step}" for step in each.forward(gpu).steps()]
    return found


def cut(context: Context, lease: Lease, taken: Sequence[Taken]) -> None:
    """Bring the GPUs of the lease to its layout, changing only what differs.

    Args:
        taken: how those are to be cut of which nothing is recorded.

    Raises:
        Busy: somebody uses what would have to change.
        ResetRequired, NoRights, StageFailed: it does not work; the message says what is left of the attempt.
    """
    claim, settings = context.claim, context.settings
    if taken:
        choices = {one.gpu.uuid: one.choice for one in taken}
        record.write(claim, lease.lease_id, nvml.boot_id(settings), [one.gpu for one in taken], choices)
    there = inventory.read(settings)
    changes = [each.forward(gpu) for each, gpu in _of_lease(record.read(claim.ledger, lease.lease_id), there)]
    _refuse_blocked(changes)
    steps = [step for change in changes for step in change.steps()]
    if not steps:
        return
    log.info("%s%d step(s): %s", _label(there), len(steps), "; ".join(map(str, steps)))
    report = privileged.carry_out(steps, settings)
    if report.kind != "done":
        if report.left:
            for uuid in {step.gpu_uuid for step in steps}:
                record.put_restored(claim, lease.lease_id, {uuid: report.left})
        raise _error(report)


def bring_back(claim: Claim, settings: Settings, lease: Lease) -> tuple[list[str], list[str]]:
    """The layout as it was before the lease: (what was done, what of it is missing), in words.

    After a reboot there is nothing to bring back: what exists is kept.

    Raises:
        Busy: somebody changes GPUs of this node right now.
        StageFailed: the driver or the privileged helper does not answer.
    """
    records = {
        uuid: each for uuid, each in record.read(claim.ledger, lease.lease_id).items() if not each.restored
    }
    if not records:
        return [], []
    boot = nvml.boot_id(settings)
    past = [uuid for uuid, each in records.items() if each.boot_id != boot]
    done = ["the node was started anew since, so what exists is kept"] if past else []
    lacking: dict[str, list[str]] = {uuid: [] for uuid in past}
    if len(past) < len(records):
        _wait_for_changes_under_way(settings)
    now = inventory.read(settings)
    for uuid in records.keys() - set(past):
        gpu = now.gpu(uuid)
        if gpu is None:
            lacking[uuid] = [f"GPU {uuid} is not there"]
            continue
        error = _bring_back(records[uuid], gpu, settings)
        again = inventory.read(settings).gpu(uuid)
        lacking[uuid] = _lacking(records[uuid], again, error) if again else [f"{gpu} is not there any more"]
        if not lacking[uuid]:
            done.append(f"{gpu} is as it was before")
    record.put_restored(claim, lease.lease_id, lacking)
    return done, [line for lines in lacking.values() for line in lines]


def _wait_for_changes_under_way(settings: Settings) -> None:
    """Until no change that this lease's run began can do anything any more: one may be starting whose asker is dead.

    A GPU that looks untouched may be about to be cut. Whoever changes it does so under the lock, and once this has
    had it, a change without its asker does nothing (`privileged`).
    """
    report = privileged.carry_out([], settings)
    if report.kind != "done":
        raise Busy(report.error) if report.kind == "busy" else StageFailed(report.error)


def _bring_back(each: Record, gpu: Gpu, settings: Settings) -> str:
    """Why it did not work; empty when it did."""
    change = each.back(gpu)
    # What somebody has put where an old instance was stays; the rest is brought back.
    blocked = {number for one in change.in_the_way for number in one.placement.slices}
    change = replace(
        change, create=tuple(spot for spot in change.create if not spot.placement.slices & blocked)
    )
    if change.is_empty:
        return ""
    return privileged.carry_out(change.steps(), settings).error


def _lacking(each: Record, gpu: Gpu, why: str) -> list[str]:
    """What is not as before, as far as it is this lease's doing."""
    found = []
    for spot in each.before.spots:
        if not any(spot.is_met_by(one) for one in gpu.instances):
            there = [str(one) for one in gpu.instances if one.placement.slices & spot.placement.slices]
            taken = f", its place is taken by {', '.join(there)}" if there else ""
            found.append(f"{gpu}: {spot} is missing{taken}")
    for one in gpu.instances:
        if each.is_ours(one):
            users = f", in use by {', '.join(map(str, one.processes))}" if one.processes else ""
            found.append(f"{gpu}: {one} at {one.placement} is still there{users}")
    foreign = [one for one in gpu.instances if not each.is_ours(one)]
    if gpu.mig_mode and not each.before.mig and not foreign:
        pending = " and goes off with the next reset or reboot" if gpu.mig_pending is False else ""
        found.append(f"{gpu}: MIG mode is on{pending}")
    if not gpu.mig_mode and each.before.mig:
        found.append(f"{gpu}: MIG mode is off")
    return [f"{line} ({why})" if why else line for line in found]


def _refuse_blocked(changes: Sequence[Difference]) -> None:
    for change in changes:
        busy = [one for one in change.in_the_way if one.processes]
        if busy:
            users = ", ".join(str(process) for one in busy for process in one.processes)
            raise Busy(
                f"{change.gpu}: {', '.join(map(str, busy))} is in the way and in use by {users}; try again when that "
                f"has ended"
            )
        if change.in_the_way:
            raise StageFailed(
                f"{change.gpu}: {', '.join(map(str, change.in_the_way))} is in the way, and this project did not make "
                f"it: somebody changes this GPU although it is leased. Destroy it, then provision again"
            )


def _error(report: Report) -> StageError:
    kinds: dict[str, type[StageError]] = {"busy": Busy, "pending": ResetRequired, "rights": NoRights}
    left = (
        f"; not taken back: {'; '.join(report.left)}" if report.left else "; the layout is as it was before"
    )
    return kinds.get(report.kind, StageFailed)(f"{report.error}{left}")


def _of_lease(records: dict[str, Record], there: Inventory) -> list[tuple[Record, Gpu]]:
    return [(records[gpu.uuid], gpu) for gpu in there.gpus if gpu.uuid in records]


def _label(there: Inventory) -> str:
    return f"{nvml.SIMULATED}: " if there.simulated else ""
