"""What cannot be brought back at once, and what a reboot leaves."""

import pytest

from tasks.errors import Busy, StageFailed
from tasks.gpu import change, cutting, inventory, privileged
from tasks.gpu.change import Report
from tasks.gpu.simulated import control
from tasks.ledger import leases
from tasks.node import lock
from tasks.reap import reap
from tests.gpu.provision.held import MIG, held, slot_uuids
from tests.runs import a_run


def test_a_restore_that_is_partial_is_recorded_keeps_the_lease_and_converges_later(
    ledger, node, execute, settings
):
    node.put(0, ("7g.80gb", 0))
    before = node.picture()
    a_run(ledger, layout={"mig": {"3g.40gb": 1}, "gpus": [0], "replace_foreign": True})
    execute("provision")
    control.start_process(node.file, 0, node.gi(0, 0), pid=12)
    with pytest.raises(
        StageFailed, match=r"restored only in part: GPU 0: 7g\.80gb at 0-7 is missing.*in use by pid 12"
    ):
        execute("restore")
    (lease,) = leases.live_leases(ledger)
    assert lease.state == "abandoned"
    with ledger.transaction() as connection:
        (row,) = ledger.queries.layouts_of_lease(connection, lease_id=lease.lease_id)
    assert (row["restored"], len(row["missing"])) == (False, 2)
    report = reap(settings)
    assert (report.reaped[0].released, "in use by pid 12" in report.reaped[0].missing) == (None, True)
    control.end_processes(node.file)
    assert reap(settings).reaped[0].released == lease.lease_id
    assert (node.picture(), held(ledger)) == (before, [])


def test_a_gpu_that_looks_as_before_is_not_given_back_while_a_change_is_under_way(
    ledger, node, execute, monkeypatch
):
    """It may be the one that this run's provision had begun when it was killed."""
    a_run(ledger, layout=MIG)
    monkeypatch.setattr(privileged, "carry_out", lambda steps, settings: Report("killed", "failed"))
    with pytest.raises(StageFailed, match="killed"):
        execute("provision")
    monkeypatch.undo()
    (lease,) = leases.live_leases(ledger)
    with (
        lock.held(change.lock_path(node.settings), "what provision began", 0),
        pytest.raises(Busy, match="what provision began"),
    ):
        execute("restore", lock_wait_s=0)
    assert [one.lease_id for one in leases.live_leases(ledger)] == [lease.lease_id]
    execute("restore")
    assert held(ledger) == []


def test_after_a_reboot_restore_keeps_what_exists_and_closes_the_lease(ledger, node, execute):
    node.put(0, ("7g.80gb", 0))
    a_run(ledger, layout={"mig": {"3g.40gb": 1}, "gpus": [0], "replace_foreign": True})
    execute("provision")
    control.reboot(node.file)
    control.set_mode(node.file, True)
    node.put(0, ("1g.10gb", 3))
    after = node.picture()
    execute("restore")
    assert (node.picture(), held(ledger)) == (after, [])


def test_after_a_reboot_provision_lays_out_anew(ledger, node, execute):
    """k8s-device-plugin #225: the layout is gone."""
    a_run(ledger, layout=MIG)
    first = execute("provision")
    control.reboot(node.file)
    again = execute("provision")
    assert (again.changed, len(again.facts["slots"])) == (True, 6)
    assert not set(slot_uuids(again)) & set(slot_uuids(first))
    execute("restore")
    assert [gpu.mig_mode for gpu in inventory.read(node.settings).gpus] == [False, False], (
        "as after the reboot"
    )


def test_a_gpu_that_falls_sick_with_a_reboot_is_not_cut_again(ledger, node, execute):
    a_run(ledger, layout=MIG)
    execute("provision")
    control.reboot(node.file)
    control.put(node.file, 1, remap_failed=True)
    with pytest.raises(StageFailed, match=r"GPU 1: row remapping failed.*restore"):
        execute("provision")
    execute("restore")
    assert len(execute("provision").facts["slots"]) == 3


def test_a_run_on_a_healthy_gpu_begins_and_ends_beside_a_lost_one(ledger, node, execute):
    control.put(node.file, 1, lost=True)
    before = node.picture()
    a_run(ledger, layout=MIG)
    assert len(execute("provision").facts["slots"]) == 3
    execute("restore")
    assert (node.picture(), held(ledger)) == (before, [])


def test_a_gpu_that_is_lost_under_its_lease_is_recorded_as_missing_until_it_is_back(
    ledger, node, execute, settings
):
    a_run(ledger, layout=MIG)
    execute("provision")
    (lease,) = leases.live_leases(ledger)
    lost = node.gpu(1).uuid
    control.put(node.file, 1, lost=True)
    with pytest.raises(StageFailed, match=rf"holds {lost}, which this node does not offer"):
        execute("provision")
    with pytest.raises(StageFailed, match=rf"restored only in part: GPU {lost} is not there"):
        execute("restore")
    assert node.layout(0) == [], "the other one is as before"
    with ledger.transaction() as connection:
        rows = list(ledger.queries.layouts_of_lease(connection, lease_id=lease.lease_id))
    assert {row["gpu_uuid"]: row["restored"] for row in rows} == {node.gpu(0).uuid: True, lost: False}
    assert lost in reap(settings).reaped[0].missing
    control.reset(node.file, 1)
    control.set_mode(node.file, True, 1)
    assert reap(settings).reaped[0].released == lease.lease_id
    assert held(ledger) == []


def test_a_gpu_that_is_lost_while_it_is_provisioned_gives_no_slots(ledger, node, execute, monkeypatch):
    a_run(ledger, layout={"tensor_parallel": 1})
    control.set_mode(node.file, False)
    cut = cutting.cut

    def lose(*arguments):
        cut(*arguments)
        control.put(node.file, 1, lost=True)

    monkeypatch.setattr(cutting, "cut", lose)
    with pytest.raises(StageFailed, match="which this node does not offer"):
        execute("provision")
