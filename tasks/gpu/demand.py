"""From a layout to the GPUs that a run takes and how each of them is to be cut. Pure.

Sick GPUs are left out and named. Where the layout leaves the choice open, the free ones that need the fewest
changes are taken; full GPUs that work together are chosen to share NVLink.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from tasks.errors import Busy, InputError, StageError, StageFailed
from tasks.gpu import mig_parted, planner, sizing
from tasks.gpu.inventory import Gpu, Inventory
from tasks.gpu.layouts import Difference, GpuLayout, difference
from tasks.gpu.planner import Choice
from tasks.gpu.sizing import Estimate
from tasks.spec import MigLayout, MigPartedLayout, TensorParallelLayout

GpuLayouts = MigLayout | MigPartedLayout | TensorParallelLayout


@dataclass(frozen=True)
class Taken:
    """One GPU that a run takes, and how it is to be cut."""

    gpu: Gpu
    choice: Choice

    @property
    def difference(self) -> Difference:
        """What changes on it."""
        return difference(self.gpu, self.choice.layout, self.choice.destroy)


@dataclass(frozen=True)
class Demand:
    """What a layout asks of a node."""

    candidates: tuple[Gpu, ...]
    """Which GPUs it may take."""
    how_many: int
    """Of the candidates."""
    counts: Mapping[str, Mapping[str, int]]
    """By UUID: profiles to cut. Empty: full GPUs."""
    group: int
    """GPUs that one worker uses."""
    replace_foreign: bool
    notes: tuple[str, ...]
    """What a person should know: sick GPUs, and how an `auto` layout came about."""


def demand(layout: GpuLayouts, there: Inventory, needs: Estimate | None) -> Demand:
    """What `layout` asks of the node `there`.

    Args:
        needs: the memory of a worker, where it is known: an `auto` layout comes from it.

    Raises:
        InputError: the node does not have it, or the layout is `auto` and nothing is known of the model yet.
        StageFailed: a GPU that the layout names is sick.
    """
    named = _named(layout, there)
    sick = [gpu for gpu in named if gpu.ailments]
    notes = [f"{gpu} is left out: {', '.join(gpu.ailments)}" for gpu in sick]
    listed = getattr(layout, "gpus", "all")
    lost = [index for index in there.lost if not isinstance(listed, list) or index in listed]
    notes += [f"GPU {index} is left out: it does not answer ({there.lost[index]})" for index in lost]
    if (sick or lost) and isinstance(listed, list):
        raise StageFailed(f"layout.gpus names a GPU on which nothing should run. {'; '.join(notes)}")
    healthy = tuple(gpu for gpu in named if not gpu.ailments)
    if not healthy:
        raise StageFailed(f"no GPU of this node is healthy. {'; '.join(notes)}")
    counts: Mapping[str, Mapping[str, int]] = {}
    if isinstance(layout, MigPartedLayout):
        counts = mig_parted.counts(layout.mig_parted, layout.config, there)
        healthy = tuple(gpu for gpu in healthy if gpu.uuid in counts)
    elif isinstance(layout, MigLayout):
        counts, how = _counts(layout, healthy, needs)
        notes += how
    how_many = layout.gpus if isinstance(layout, (MigLayout, TensorParallelLayout)) else "all"
    number = how_many if isinstance(how_many, int) else len(healthy)
    if number > len(named) + len(lost):
        raise InputError(
            f"layout.gpus: {number} GPUs are asked for, and this node has {len(named) + len(lost)}"
        )
    if number > len(healthy):
        raise StageFailed(
            f"layout.gpus: {number} GPUs are asked for, and {len(healthy)} are healthy. {'; '.join(notes)}"
        )
    group = layout.tensor_parallel if isinstance(layout, TensorParallelLayout) else 1
    if number % group:
        raise InputError(
            f"layout.gpus: {number} GPU(s) cannot be grouped by {group} (layout.tensor_parallel) without a remainder"
        )
    return Demand(healthy, number, counts, group, getattr(layout, "replace_foreign", False), tuple(notes))


def pick(asked: Demand, there: Inventory, held: frozenset[str] = frozenset()) -> tuple[Taken, ...]:
    """The GPUs to take, each with the layout that it gets; by index.

    Args:
        held: UUIDs that other runs hold. Where all candidates are wanted, it is the lease that says busy.

    Raises:
        InputError: it does not fit.
        Busy: what it needs is in use, or held by other runs.
    """
    everything = asked.how_many == len(asked.candidates)
    free = [gpu for gpu in asked.candidates if everything or gpu.uuid not in held]
    possible: list[Taken] = []
    refusals: list[StageError] = []
    for gpu in free:
        try:
            possible.append(Taken(gpu, _cut(gpu, asked)))
        except StageError as refusal:
            refusals.append(refusal)
    if everything and refusals:
        raise _together(refusals)
    if len(possible) < asked.how_many:
        if len(free) < asked.how_many:
            raise Busy(
                f"{asked.how_many} GPUs are asked for (layout.gpus), and {len(free)} of {len(asked.candidates)} are "
                f"not leased to another run; try again when one has ended (`qwen-pipeline status` shows them)"
            )
        raise _together(refusals)
    best = sorted(possible, key=_cost)
    if asked.group > 1:
        chosen = _linked(best, asked.how_many // asked.group, asked.group, there)
        best = [taken for group in chosen for taken in group] if chosen else best
    return tuple(sorted(best[: asked.how_many], key=lambda taken: taken.gpu.index))


def groups(uuids: Iterable[str], size: int, there: Inventory) -> list[tuple[str, ...]]:
    """The GPUs in groups of `size` that share NVLink where that is possible; neighbours where it is not."""
    nothing = Choice(GpuLayout(False, ()), ())
    known = [Taken(gpu, nothing) for gpu in there.gpus if gpu.uuid in set(uuids)]
    found = _linked(known, len(known) // size, size, there)
    if found is None:
        found = [known[start : start + size] for start in range(0, len(known), size)]
    return [tuple(taken.gpu.uuid for taken in group) for group in found]


def _named(layout: GpuLayouts, there: Inventory) -> Sequence[Gpu]:
    if not isinstance(layout, MigPartedLayout) and isinstance(layout.gpus, list):
        missing = sorted(set(layout.gpus) - {gpu.index for gpu in there.gpus} - there.lost.keys())
        if missing:
            raise InputError(
                f"layout.gpus: there is no GPU {', '.join(map(str, missing))} on this node; it has "
                f"{', '.join(str(gpu.index) for gpu in there.gpus)}"
            )
        return [gpu for gpu in there.gpus if gpu.index in layout.gpus]
    return there.gpus


def _counts(
    layout: MigLayout, gpus: Sequence[Gpu], needs: Estimate | None
) -> tuple[dict[str, Mapping[str, int]], list[str]]:
    if layout.mig != "auto":
        return {gpu.uuid: layout.mig for gpu in gpus}, []
    if needs is None:
        raise InputError(
            "layout.mig: `auto` is chosen from the release, and there is none yet: run `qwen-pipeline download` and "
            "`convert` first, or name the profiles"
        )
    counts: dict[str, Mapping[str, int]] = {}
    notes = []
    for gpu in gpus:
        profile = sizing.smallest(gpu.cut.profiles, needs)
        counts[gpu.uuid] = {profile.name: planner.most_of(gpu, profile)}
        holds = "" if needs.fits(profile.memory_mb << 20) else ", with less KV cache than asked for"
        notes.append(
            f"auto: {counts[gpu.uuid][profile.name]} x {profile.name} ({profile.memory_mb / 1024:.1f} GiB "
            f"each{holds}), because {needs.describe()}"
        )
    return counts, sorted(set(notes))


def _cut(gpu: Gpu, asked: Demand) -> Choice:
    if asked.counts:
        if gpu.mig_mode is None:
            raise InputError(f"layout: {gpu} ({gpu.name}) cannot be cut: it has no MIG")
        return planner.choose(gpu, asked.counts[gpu.uuid], asked.replace_foreign)
    if gpu.instances:
        raise StageFailed(
            f"layout.tensor_parallel: full GPUs need MIG off, and {gpu} is cut into "
            f"{', '.join(map(str, gpu.instances))}: destroy them, or choose others with layout.gpus"
        )
    if gpu.processes:
        users = ", ".join(map(str, gpu.processes))
        raise Busy(
            f"{gpu} is in use by {users}; try again when that has ended, or choose others with layout.gpus"
        )
    return Choice(GpuLayout(False, ()), ())


def _cost(taken: Taken) -> tuple[int, int, int, int]:
    change = taken.difference
    return (len(change.destroy), int(change.mode is not None), len(change.create), taken.gpu.index)


def _linked(free: Sequence[Taken], number: int, size: int, there: Inventory) -> list[list[Taken]] | None:
    """So many groups whose members all share NVLink, the best first; None when there are not so many."""
    if number == 0:
        return []
    for group in _groups_with_first(free, size, there):
        rest = [taken for taken in free if taken not in group]
        others = _linked(rest, number - 1, size, there)
        if others is not None:
            return [group, *others]
    # Without the first one, if enough are left.
    return _linked(free[1:], number, size, there) if len(free) > number * size else None


def _groups_with_first(free: Sequence[Taken], size: int, there: Inventory) -> Iterator[list[Taken]]:
    if len(free) < size:
        return
    for others in combinations(free[1:], size - 1):
        group = [free[0], *others]
        if there.are_linked([taken.gpu.uuid for taken in group]):
            yield group


def _together(refusals: Sequence[StageError]) -> StageError:
    """One error of several. What a user must change comes before what time mends."""
    first = next((each for each in refusals if isinstance(each, InputError)), refusals[0])
    same = [str(each) for each in refusals if type(each) is type(first)]
    more = f" (and {len(same) - 2} more)" if len(same) > 2 else ""
    return type(first)("; ".join(same[:2]) + more)
