"""What the ledger knows of the layouts of a lease: how its GPUs were cut before, and what it uses of them.

Keeps: the record is written before the first change and never by a later one, so that a restore after any kill
knows what was there. An instance of the target that was not there before is this lease's own, and nothing else is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psycopg.types.json import Jsonb

from tasks.gpu.instances import Instance
from tasks.gpu.inventory import Gpu
from tasks.gpu.layouts import Difference, GpuLayout, Spot, difference, layout_of, spot_of
from tasks.gpu.planner import Choice
from tasks.ledger import Claim, Ledger


@dataclass(frozen=True)
class Record:
    """One GPU of a lease."""

    gpu_uuid: str
    boot_id: str
    before: GpuLayout
    target: GpuLayout
    """The instances that the lease uses, those that were there before among them."""
    replaced: tuple[Spot, ...] = ()
    """Instances from before that make room for the target, and come back."""
    restored: bool = False
    missing: tuple[str, ...] = ()
    """What the last restore could not bring back."""

    def is_ours(self, instance: Instance) -> bool:
        """Whether this lease made `instance`: it is at a place of the target where there was none like it before."""
        made = any(spot.is_at(instance) for spot in self.target.spots)
        return made and not any(spot.is_at(instance) for spot in self.before.spots)

    def forward(self, gpu: Gpu) -> Difference:
        """From `gpu` as it is to what the lease uses."""
        ours = [one for one in gpu.instances if self.is_ours(one)]
        making_room = [
            one
            for one in gpu.instances
            if not one.processes and any(spot.is_at(one) for spot in self.replaced)
        ]
        return difference(gpu, self.target, [*ours, *making_room], ours)

    def back(self, gpu: Gpu) -> Difference:
        """From `gpu` as it is to how it was before."""
        ours = [one for one in gpu.instances if self.is_ours(one) and not one.processes]
        # At the place of one that had to go: a restore, or its destruction, was interrupted.
        halves = [
            one
            for one in gpu.instances
            if any(spot.is_at(one) and not spot.is_met_by(one) for spot in self.replaced)
            and not one.processes
        ]
        orphans = [one for one in halves if one.is_orphan]
        return difference(gpu, self.before, [*ours, *(one for one in halves if not one.is_orphan)], orphans)


def read(ledger: Ledger, lease_id: int) -> dict[str, Record]:
    """The records of a lease by GPU; empty for one that changed nothing."""
    with ledger.transaction() as connection:
        rows = list(ledger.queries.layouts_of_lease(connection, lease_id=lease_id))
    return {
        row["gpu_uuid"]: Record(
            gpu_uuid=row["gpu_uuid"],
            boot_id=row["boot_id"],
            before=GpuLayout.of(row["before"]),
            target=GpuLayout.of(row["target"]),
            replaced=tuple(Spot.of(one) for one in row["replaced"]),
            restored=row["restored"],
            missing=tuple(row["missing"]),
        )
        for row in rows
    }


def write(
    claim: Claim, lease_id: int, boot_id: str, gpus: Sequence[Gpu], choices: Mapping[str, Choice]
) -> None:
    """Record how `gpus` are cut now and what they shall be; what is recorded of this boot stays.

    Raises:
        Fenced: the claim has ended.
    """
    with claim.writing() as connection:
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid):
            claim.ledger.queries.record_layout(
                connection,
                lease_id=lease_id,
                gpu_uuid=gpu.uuid,
                boot_id=boot_id,
                before=Jsonb(layout_of(gpu).document()),
                target=Jsonb(choices[gpu.uuid].layout.document()),
                replaced=Jsonb([spot_of(one).document() for one in choices[gpu.uuid].destroy]),
            )


def put_restored(claim: Claim, lease_id: int, missing: Mapping[str, Sequence[str]]) -> None:
    """Record for each GPU what of its old layout is missing; nothing: it is restored.

    Raises:
        Fenced: the claim has ended.
    """
    queries = claim.ledger.queries
    with claim.writing() as connection:
        for gpu_uuid, lines in sorted(missing.items()):
            key = {"lease_id": lease_id, "gpu_uuid": gpu_uuid}
            if lines:
                queries.layout_misses(connection, **key, missing=Jsonb(list(lines)))
            else:
                queries.layout_is_restored(connection, **key)
