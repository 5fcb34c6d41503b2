"""provision and restore, killed everywhere, on a layout of CPU cores."""

from typing import Any

import pytest

from tests.kill.harness import World, kill_everywhere, kill_in_a_row, stage
from tests.kill.invariants import after_a_stage
from tests.runs import a_spec

RUN = "run-1"


@pytest.fixture
def ready(world: World) -> World:
    """A run that may take a device."""
    world.register(RUN, a_spec())
    world.finish(RUN, "prepare", {"batch_id": "batch-1", "to_do": 3})
    return world


def leases(world: World) -> list[dict[str, Any]]:
    """All of them, without what differs from one time to another."""
    return world.rows(
        "select run_id, node, state, array_agg(device order by device) as devices "
        "from lease join lease_device using (lease_id, node) group by lease_id, run_id, node, state "
        "order by lease_id"
    )


def test_provision_and_then_restore_survive_a_kill_at_every_point(ready: World) -> None:
    kill_everywhere(stage("provision", RUN), ready, check=after_a_stage, picture=leases)
    assert [lease["state"] for lease in leases(ready)] == ["held"]
    kill_everywhere(stage("restore", RUN), ready, check=after_a_stage, picture=leases)
    assert [lease["state"] for lease in leases(ready)] == ["released"]


def test_provision_survives_being_killed_again_and_again(ready: World) -> None:
    kill_in_a_row(stage("provision", RUN), ready, check=after_a_stage)
    assert [lease["state"] for lease in leases(ready)] == ["held"]
