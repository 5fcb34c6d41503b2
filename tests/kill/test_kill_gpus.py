"""provision and restore of a simulated GPU, killed at every call of the driver's library.

Killed around the calls of NVML that change something, and at a sample of the others. KILL_EVERY_POINT=1 kills at all.
"""

import json
from typing import Any

import pytest

from tests.gpu.node import a_node
from tests.kill.harness import Point, World, kill_everywhere, stage
from tests.kill.invariants import after_a_stage
from tests.runs import a_spec

RUN = "run-1"
NODE = "h100-80*1"
PROVISION, RESTORE = stage("provision", RUN), stage("restore", RUN)


@pytest.fixture
def ready(world: World) -> World:
    """A run that needs the place of what somebody made, on a GPU that has something else, too."""
    node = a_node(world.home, NODE, mig=True)
    node.put(0, ("1g.10gb", 1), ("2g.20gb", 4))
    assert node.settings.nvml_state is not None
    world.environment["QWEN_PIPELINE_NVML"] = node.settings.nvml
    world.environment["QWEN_PIPELINE_NVML_STATE"] = str(node.settings.nvml_state)
    world.register(RUN, a_spec(layout={"mig": {"3g.40gb": 1, "1g.10gb": 1}, "replace_foreign": True}))
    world.finish(RUN, "prepare", {"batch_id": "batch-1", "to_do": 3})
    return world


def picture(world: World) -> dict[str, Any]:
    """The layout of the GPU, without what differs each time, and what the ledger holds."""
    (gpu,) = json.loads((world.home / f"node-{NODE.replace('*', '-')}").read_text())["gpus"]
    return {
        "mode": [gpu["mig"], gpu["mig_pending"]],
        "instances": sorted(
            (one["profile_id"], one["start"], len(one["compute"])) for one in gpu["instances"]
        ),
        "leases": world.rows("select run_id, state from lease order by lease_id"),
        "layouts": world.rows("select restored_at is not null as restored, missing from lease_layout"),
        "line": world.rows("select run_id from lease_place"),
    }


def changes_the_layout(point: Point) -> bool:
    """The driver's calls that change something, commits, and one in twenty of the rest."""
    words = ("Create", "Destroy", "SetMigMode")
    return point.kind == "commit" or any(word in point.name for word in words) or point.n % 20 == 0


def test_provision_and_then_restore_of_a_gpu_survive_a_kill_at_any_call(ready: World) -> None:
    before = picture(ready)["instances"]
    kill_everywhere(
        PROVISION, ready, check=after_a_stage, picture=picture, where=changes_the_layout, at_most=6
    )
    cut = picture(ready)
    assert [(profile, compute) for profile, _, compute in cut["instances"]] != [
        (profile, compute) for profile, _, compute in before
    ]
    kill_everywhere(RESTORE, ready, check=after_a_stage, picture=picture, where=changes_the_layout, at_most=6)
    after = picture(ready)
    assert after["instances"] == before
    assert [lease["state"] for lease in after["leases"]] == ["released"]
