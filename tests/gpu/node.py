"""A simulated node as tests see it: cut by hand, used by others, broken."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.gpu import change, inventory, nvml, planner
from tasks.gpu.change import Report
from tasks.gpu.inventory import Gpu
from tasks.gpu.layouts import Spot, Step, difference
from tasks.gpu.simulated import control
from tasks.gpu.simulated.library import Library
from tasks.gpu.simulated.state import StateFile
from tasks.settings import Settings


@dataclass(frozen=True)
class Node:
    """The node of `settings`."""

    settings: Settings

    @property
    def library(self) -> Library:
        """The driver of this process."""
        found = nvml.simulation(self.settings)
        assert found is not None, "it is simulated"
        return found

    @property
    def file(self) -> StateFile:
        """For `control`."""
        return self.library.file

    def gpu(self, index: int = 0) -> Gpu:
        """Read now."""
        return inventory.read(self.settings).gpus[index]

    def uuids(self, index: int = 0) -> dict[str, list[str]]:
        """MIG devices by profile."""
        found: dict[str, list[str]] = {}
        for one in self.gpu(index).instances:
            found.setdefault(one.name, []).extend(part.uuid for part in one.compute)
        return found

    def layout(self, index: int = 0) -> list[str]:
        """Instances with their places, by place."""
        return [f"{one.name}@{one.placement.start}" for one in self.gpu(index).instances]

    def picture(self) -> Any:
        """Modes and layouts of all GPUs, to be compared."""
        state = self.file.read()
        return [(gpu["mig"], gpu["mig_pending"]) for gpu in state["gpus"]], control.layout(state)

    def put(self, index: int, *places: tuple[str, int]) -> Report:
        """Instances at places that somebody chose: ("1g.10gb", 2)."""
        gpu = self.gpu(index)
        steps = []
        for name, start in places:
            profile = next(each for each in gpu.cut.profiles if each.name == name)
            place = next(each for each in profile.placements if each.start == start)
            steps.append(Step("create", gpu.uuid, Spot(place, profile.profile_id, name)))
        return change.carry_out(steps, self.settings)

    def orphan(self, index: int, name: str, start: int) -> None:
        """A GPU instance without compute instance, as somebody left it."""
        profile = next(each for each in self.gpu(index).cut.profiles if each.name == name)
        size = profile.placements[0].size
        with self.file.changing() as state:
            state["made"] += 1
            state["gpus"][index]["instances"].append(
                {
                    "gi": 90 + start,
                    "made": state["made"],
                    "profile_id": profile.profile_id,
                    "start": start,
                    "size": size,
                    "compute": [],
                }
            )

    def cut(self, counts: Mapping[str, int], index: int = 0, replace_foreign: bool = False) -> Report:
        """Plan and carry out, as a stage does, without a ledger."""
        return change.carry_out(self.steps(counts, index, replace_foreign), self.settings)

    def steps(self, counts: Mapping[str, int], index: int = 0, replace_foreign: bool = False) -> list[Step]:
        """Only plan."""
        gpu = self.gpu(index)
        choice = planner.choose(gpu, counts, replace_foreign)
        return difference(gpu, choice.layout, choice.destroy).steps()

    def gi(self, index: int, start: int) -> int:
        """The id of the GPU instance at `start`."""
        return next(one.gi for one in self.gpu(index).instances if one.placement.start == start)


def a_node(folder: Path, what: str, mig: bool, **settings: Any) -> Node:
    """A node in `folder`; the same folder and name is the same node."""
    state = folder / f"node-{what.replace('*', '-')}"
    fresh = not state.exists()
    node = Node(Settings(home=folder, nvml=f"sim:{what}", nvml_state=state, **settings))
    if fresh and mig:
        control.set_mode(node.file, True)
    return node
