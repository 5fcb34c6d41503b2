"""Layouts of one GPU as plain data: what the ledger keeps, what the privileged helper is told, what plans compare."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.gpu.instances import Instance, Placement
from tasks.gpu.inventory import Gpu


@dataclass(frozen=True, order=True)
class Spot:
    """One GPU instance at its place, whether it is there or only wanted there."""

    placement: Placement
    profile_id: int
    name: str
    compute: tuple[tuple[int, int], ...] | None = None
    """Its compute instances as (start, profile id); None: one that spans it."""

    def is_at(self, instance: Instance) -> bool:
        """Whether `instance` is of this kind and at this place, complete or not."""
        return (self.placement, self.profile_id) == (instance.placement, instance.profile_id)

    def is_met_by(self, instance: Instance) -> bool:
        """Whether `instance` is this, down to its compute instances."""
        if not self.is_at(instance):
            return False
        return instance.is_whole if self.compute is None else _compute(instance) == self.compute

    def __str__(self) -> str:
        return f"{self.name} at {self.placement}"

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "profile_id": self.profile_id,
            "name": self.name,
            "start": self.placement.start,
            "size": self.placement.size,
            "compute": None if self.compute is None else [list(one) for one in self.compute],
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Spot":
        """From JSON."""
        parts = document["compute"]
        compute = None if parts is None else tuple((int(start), int(profile)) for start, profile in parts)
        placement = Placement(int(document["start"]), int(document["size"]))
        return cls(placement, int(document["profile_id"]), str(document["name"]), compute)


@dataclass(frozen=True)
class GpuLayout:
    """How a GPU is cut, or should be."""

    mig: bool
    spots: tuple[Spot, ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"mig": self.mig, "instances": [spot.document() for spot in self.spots]}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "GpuLayout":
        """From JSON."""
        return cls(bool(document["mig"]), tuple(Spot.of(one) for one in document["instances"]))


def spot_of(instance: Instance) -> Spot:
    """Where and what `instance` is."""
    compute = None if instance.is_whole else _compute(instance)
    return Spot(instance.placement, instance.profile_id, instance.name, compute)


def layout_of(gpu: Gpu) -> GpuLayout:
    """How `gpu` is cut now."""
    return GpuLayout(bool(gpu.mig_mode), tuple(sorted(spot_of(one) for one in gpu.instances)))


@dataclass(frozen=True)
class Step:
    """One change of one GPU."""

    do: str
    """`mode`, `destroy`, `create`, or `complete` (a GPU instance that has no compute instance yet)."""
    gpu_uuid: str
    spot: Spot | None = None
    """Of all but `mode`."""
    on: bool = False
    """Of `mode`."""

    def __str__(self) -> str:
        what = f"MIG mode {'on' if self.on else 'off'}" if self.spot is None else str(self.spot)
        return f"{self.do} {what}"

    def document(self) -> dict[str, Any]:
        """As JSON."""
        base: dict[str, Any] = {"do": self.do, "gpu_uuid": self.gpu_uuid}
        return base | ({"on": self.on} if self.spot is None else {"spot": self.spot.document()})


@dataclass(frozen=True)
class Difference:
    """What must change on one GPU so that `wanted` is there."""

    gpu: Gpu
    mode: bool | None
    """MIG mode to set; None: it is right."""
    keep: tuple[Instance, ...]
    create: tuple[Spot, ...]
    """Largest first: a 3g cannot be placed after stray 1g (harvester #11636)."""
    complete: tuple[Spot, ...]
    """GPU instances that are there and lack their compute instances."""
    destroy: tuple[Instance, ...]
    in_the_way: tuple[Instance, ...]
    """What is not ours to destroy, or in use, where something is to be created."""

    @property
    def is_empty(self) -> bool:
        """Whether all is as wanted."""
        return self.mode is None and not (self.create or self.complete or self.destroy)

    def steps(self) -> list[Step]:
        """In the order in which they can be done."""
        uuid = self.gpu.uuid
        steps = [Step("destroy", uuid, spot_of(one)) for one in self.destroy]
        if self.mode is not None:
            # Switched on, it is empty; switched off, it must be.
            steps.insert(0 if self.mode else len(steps), Step("mode", uuid, on=self.mode))
        steps += [Step("complete", uuid, spot) for spot in self.complete]
        return [*steps, *(Step("create", uuid, spot) for spot in self.create)]


def difference(
    gpu: Gpu, wanted: GpuLayout, removable: Iterable[Instance], completable: Iterable[Instance] = ()
) -> Difference:
    """From `gpu` as it is to `wanted`, touching nothing else.

    Args:
        removable: what may be destroyed, and is when it is not wanted.
        completable: GPU instances that may get their compute instances.
    """
    kept: list[Instance] = []
    complete: list[Spot] = []
    completed: list[Instance] = []
    create: list[Spot] = []
    may_complete, may_go = list(completable), list(removable)
    for spot in wanted.spots:
        there = [one for one in gpu.instances if spot.is_at(one)]
        if there and spot.is_met_by(there[0]):
            kept.append(there[0])
        elif there and there[0].is_orphan and there[0] in may_complete:
            complete.append(spot)
            completed.append(there[0])
        else:
            create.append(spot)
    destroy = [one for one in may_go if one not in kept and one not in completed]
    staying = [one for one in gpu.instances if one not in destroy]
    taken = {number for spot in create for number in spot.placement.slices}
    blocking = tuple(one for one in staying if one.placement.slices & taken)
    mode = wanted.mig if bool(gpu.mig_mode) != wanted.mig or _pending(gpu) else None
    if mode is False and staying:
        mode = None  # what is not ours keeps MIG on
    return Difference(
        *(gpu, mode, tuple(kept), largest_first(create), tuple(complete), tuple(destroy), blocking)
    )


def largest_first(spots: Sequence[Spot]) -> tuple[Spot, ...]:
    """In the order of creation."""
    return tuple(sorted(spots, key=lambda spot: (-spot.placement.size, spot.placement.start)))


def _pending(gpu: Gpu) -> bool:
    return gpu.mig_pending is not None and gpu.mig_pending != gpu.mig_mode


def _compute(instance: Instance) -> tuple[tuple[int, int], ...]:
    return tuple((one.start, one.profile_id) for one in instance.compute)
