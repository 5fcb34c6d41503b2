"""From counts of profiles to places on one GPU, changing as little as possible. Pure.

Keeps: an instance that stays keeps its UUID; what is in use, or not this project's, is worked around or the plan
is refused with what is in the way. No profile is known here: names, sizes, places and numbers come with the GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from tasks.errors import Busy, InputError, StageError
from tasks.gpu.instances import Instance, Placement, Profile
from tasks.gpu.inventory import Gpu
from tasks.gpu.layouts import GpuLayout, Spot, largest_first


class UnknownProfile(InputError):
    """The device offers no profile of that name; the message lists those that it offers."""


class DoesNotFit(InputError):
    """The message names the profile, the GPU and what takes its memory slices."""


@dataclass(frozen=True)
class Choice:
    """Where the wanted profiles go on one GPU."""

    layout: GpuLayout
    """The instances that the layout uses: those that stay and those to be made."""
    destroy: tuple[Instance, ...]


def choose(gpu: Gpu, counts: Mapping[str, int], replace_foreign: bool = False) -> Choice:
    """The places for `counts` of profiles on `gpu`, so that the fewest instances are destroyed.

    Whole idle instances of a wanted profile are used as they are; others stay where they do not hinder.

    Args:
        replace_foreign: whether idle instances that somebody else made may be destroyed.

    Raises:
        UnknownProfile: the driver calls none so; the message lists what it offers.
        DoesNotFit: even on an empty GPU, or beside what others have there.
        Busy: processes use what would have to go; the message names them.
    """
    wanted = _resolved(gpu, counts)
    if _placed(wanted, gpu, ()) is None:
        raise DoesNotFit(
            f"layout.mig: {_shown(counts)} do not fit together on {gpu} ({gpu.name}), not even when it is empty; "
            f"it holds at most {_offers(gpu)}"
        )
    if not gpu.mig_mode and gpu.processes:
        raise Busy(
            f"{gpu} cannot be cut while {_processes(gpu)} use(s) it: end that, or leave the GPU out with "
            f"layout.gpus"
        )
    idle = [one for one in gpu.instances if not one.processes]
    for several in _subsets(idle if replace_foreign else []):
        possible = [
            Choice(GpuLayout(True, found), destroy)
            for destroy in several
            if (found := _beside(wanted, gpu, [one for one in gpu.instances if one not in destroy]))
            is not None
        ]
        if possible:
            return min(possible, key=lambda choice: _effort(choice, gpu))
    raise _refusal(gpu, counts, wanted, idle, replace_foreign)


def offers(gpu: Gpu) -> str:
    """The names of what the device offers."""
    return ", ".join(profile.name for profile in gpu.cut.profiles) or "no MIG profile at all"


def most_of(gpu: Gpu, profile: Profile) -> int:
    """How many of one profile an empty GPU holds."""
    return max(
        (count for count in range(profile.most + 1) if _placed([profile] * count, gpu, ()) is not None),
        default=0,
    )


def _resolved(gpu: Gpu, counts: Mapping[str, int]) -> list[Profile]:
    known = {profile.name: profile for profile in gpu.cut.profiles}
    unknown = [name for name in counts if name.removeprefix("MIG ") not in known]
    if unknown:
        raise UnknownProfile(
            f"layout.mig: {gpu} ({gpu.name}) has no profile {', '.join(unknown)}; its driver offers {offers(gpu)}"
        )
    return [known[name.removeprefix("MIG ")] for name, count in counts.items() for _ in range(count)]


def _beside(wanted: Sequence[Profile], gpu: Gpu, staying: Sequence[Instance]) -> tuple[Spot, ...] | None:
    """The wanted ones: first instances that stay and can be used, then new ones in the room that is left."""
    usable = [one for one in staying if one.is_whole and not one.processes]
    used: list[Spot] = []
    rest: list[Profile] = []
    for profile in wanted:
        match = next((one for one in usable if one.profile_id == profile.profile_id), None)
        if match is None:
            rest.append(profile)
        else:
            usable.remove(match)
            used.append(Spot(match.placement, match.profile_id, match.name))
    made = _placed(rest, gpu, staying)
    return None if made is None else tuple(sorted([*used, *made]))


def _placed(wanted: Sequence[Profile], gpu: Gpu, staying: Sequence[Instance]) -> tuple[Spot, ...] | None:
    """Places for new instances beside those that stay; None when there are none."""
    taken = frozenset(number for one in staying for number in one.placement.slices)
    known = {profile.profile_id: profile for profile in gpu.cut.profiles}
    computing = sum(known[one.profile_id].compute_slices for one in staying)
    # A GPU has as many compute slices as its largest profile.
    if computing + sum(p.compute_slices for p in wanted) > max(
        (p.compute_slices for p in known.values()), default=0
    ):
        return None
    for profile in set(wanted):
        there = sum(one.profile_id == profile.profile_id for one in staying)
        if there + sum(one == profile for one in wanted) > profile.most:
            return None
    ordered = sorted(
        wanted, key=lambda profile: (-_size(profile), -profile.compute_slices, profile.profile_id)
    )
    found = _search(ordered, taken, Placement(-1, 0))
    return None if found is None else largest_first(found)


def _search(wanted: Sequence[Profile], taken: frozenset[int], after: Placement) -> list[Spot] | None:
    if not wanted:
        return []
    profile, rest = wanted[0], wanted[1:]
    for place in profile.placements:
        # Equal ones in one order only: the others are the same layout.
        if place <= after or place.slices & taken:
            continue
        follows = place if rest and rest[0] == profile else Placement(-1, 0)
        found = _search(rest, taken | place.slices, follows)
        if found is not None:
            return [Spot(place, profile.profile_id, profile.name), *found]
    return None


def _subsets(instances: Sequence[Instance]) -> Iterator[list[tuple[Instance, ...]]]:
    """By number, the fewest first."""
    for count in range(len(instances) + 1):
        yield list(combinations(instances, count))


def _effort(choice: Choice, gpu: Gpu) -> tuple[int, int]:
    """Of choices that destroy equally many: how many are made, then how much of the GPU is destroyed."""
    kept = sum(any(spot.is_at(one) for one in gpu.instances) for spot in choice.layout.spots)
    return len(choice.layout.spots) - kept, sum(one.placement.size for one in choice.destroy)


def _refusal(
    gpu: Gpu, counts: Mapping[str, int], wanted: Sequence[Profile], idle: Sequence[Instance], replace: bool
) -> StageError:
    staying = [one for one in gpu.instances if one not in idle]
    place_for = "; ".join(
        f"{name} needs slices {' or '.join(map(str, _profile(gpu, name).placements))}" for name in counts
    )
    if _beside(wanted, gpu, staying) is not None and not replace:
        return DoesNotFit(
            f"layout.mig: {_shown(counts)} do not fit on {gpu} beside what is there: {_taken(gpu.instances)}. "
            f"{place_for}. None of these is this project's: destroy them, leave the GPU out with layout.gpus, or set "
            f"layout.replace_foreign: true, which destroys idle ones and makes them again afterwards"
        )
    busy = [one for one in gpu.instances if one.processes]
    return Busy(
        f"{_shown(counts)} do not fit on {gpu} beside what is in use: {_taken(busy)}. {place_for}. "
        f"Try again when {_processes(gpu)} has (have) ended, or leave the GPU out with layout.gpus"
    )


def _profile(gpu: Gpu, name: str) -> Profile:
    return next(each for each in gpu.cut.profiles if each.name == name.removeprefix("MIG "))


def _taken(instances: Sequence[Instance]) -> str:
    return ", ".join(
        f"slices {one.placement} by {one}"
        + (f", used by {', '.join(map(str, one.processes))}" if one.processes else "")
        for one in instances
    )


def _processes(gpu: Gpu) -> str:
    return ", ".join(str(process) for process in gpu.processes) or "what uses it"


def _shown(counts: Mapping[str, int]) -> str:
    return " + ".join(f"{count} x {name}" for name, count in counts.items())


def _offers(gpu: Gpu) -> str:
    return ", ".join(f"{most_of(gpu, profile)} x {profile.name}" for profile in gpu.cut.profiles)


def _size(profile: Profile) -> int:
    return max((place.size for place in profile.placements), default=0)
