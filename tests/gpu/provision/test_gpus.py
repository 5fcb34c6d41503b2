"""GPUs are cut for a run and brought back as they were."""

import pynvml
import pytest

from tasks import settings as deployment
from tasks.cli import main as cli
from tasks.errors import Busy, InputError, StageFailed
from tasks.gpu import change, inventory
from tasks.gpu.cutting import NoRights, ResetRequired
from tasks.gpu.simulated import control
from tasks.ledger import leases
from tasks.reap import reap
from tests.gpu.node import a_node
from tests.gpu.provision.held import MIG, held, slot_uuids
from tests.runs import a_run, environment_of


def test_gpus_are_cut_and_each_device_is_a_slot_of_its_own(ledger, node, execute):
    a_run(ledger, layout=MIG)
    result = execute("provision")
    assert result.message.startswith("SIMULATED GPUs: lease 1 on GPU-")
    assert result.facts["simulated"]
    assert [slot["slot_id"] for slot in result.facts["slots"]] == [f"mig-{n}" for n in range(6)]
    stands_for = [slot["stands_for"] for slot in result.facts["slots"]]
    assert [slot["profile"] for slot in stands_for] == ["3g.40gb", "1g.10gb", "1g.10gb"] * 2
    there = [uuid for index in range(2) for uuids in node.uuids(index).values() for uuid in uuids]
    assert sorted(slot["uuid"] for slot in stands_for) == sorted(there)
    again = execute("provision")
    assert (again.changed, again.facts) == (False, result.facts)


@pytest.mark.parametrize("product", ["h100-80*2", "a100-80*2"])
def test_restore_brings_back_what_was_there(ledger, execute, tmp_path, product):
    node = a_node(tmp_path, product, mig=True)
    node.put(0, ("1g.10gb", 1), ("2g.20gb", 4))
    node.put(1, ("7g.80gb", 0))
    before, kept = node.picture(), node.uuids()["1g.10gb"]
    a_run(ledger, layout={"mig": {"3g.40gb": 1, "1g.10gb": 1}, "replace_foreign": True})
    where = {"nvml": node.settings.nvml, "nvml_state": node.settings.nvml_state}
    execute("provision", **where)
    assert node.picture() != before
    result = execute("restore", **where)
    assert (node.picture(), held(ledger)) == (before, [])
    assert node.uuids()["1g.10gb"] == kept, "what could stay was never touched"
    assert "as it was" in result.message


def test_mode_goes_off_again_where_it_was_off(ledger, execute, tmp_path):
    node = a_node(tmp_path, "h100-80*1", mig=False)
    before = node.picture()
    a_run(ledger, layout=MIG)
    where = {"nvml": node.settings.nvml, "nvml_state": node.settings.nvml_state}
    execute("provision", **where)
    assert node.gpu().mig_mode
    execute("restore", **where)
    assert node.picture() == before


def test_an_instance_destroyed_behind_its_back_is_noticed_and_made_again(ledger, node, execute):
    a_run(ledger, layout={**MIG, "gpus": [0]})
    first = execute("provision")
    gpu = node.gpu()
    lost = next(one for one in gpu.instances if one.name == "3g.40gb")
    steps = [change.Step("destroy", gpu.uuid, change.Spot(lost.placement, lost.profile_id, lost.name))]
    assert change.carry_out(steps, node.settings).error == ""
    again = execute("provision")
    assert again.changed
    assert slot_uuids(again)[1:] == slot_uuids(first)[1:]
    assert slot_uuids(again)[0] != slot_uuids(first)[0], "UUIDs cannot come back"


def test_what_is_not_ours_is_kept_or_the_plan_is_refused(ledger, node, execute):
    node.put(0, ("1g.10gb", 1), ("1g.10gb", 5))
    before = node.picture()
    a_run(ledger, layout={"mig": {"3g.40gb": 1}, "gpus": [0]})
    with pytest.raises(InputError, match=r"do not fit on GPU 0 beside what is there: slices 1 by"):
        execute("provision")
    assert (node.picture(), held(ledger)) == (before, [])


def test_somebody_elses_process_makes_it_busy_and_is_named(
    ledger, node, execute, settings, capsys, monkeypatch
):
    node.put(0, ("7g.80gb", 0))
    control.start_process(node.file, 0, node.gi(0, 0), pid=31337, name="python train.py")
    before = node.picture()
    a_run(ledger, layout={"mig": {"3g.40gb": 1}, "gpus": [0], "replace_foreign": True})
    for name, value in environment_of(settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("QWEN_PIPELINE_NVML", settings.nvml)
    monkeypatch.setenv("QWEN_PIPELINE_NVML_STATE", str(settings.nvml_state))
    monkeypatch.setenv("QWEN_PIPELINE_LEASE_WAIT_S", "0")
    deployment.current.cache_clear()
    assert cli(["provision", "--run", "run-1"]) == 3
    deployment.current.cache_clear()
    assert "pid 31337 (python train.py)" in capsys.readouterr().err
    assert (node.picture(), held(ledger)) == (before, [])


def test_pending_mode_is_an_error_of_its_own_and_the_run_goes_on_after_the_reset(ledger, execute, tmp_path):
    node = a_node(tmp_path, "a100-80*1", mig=False)
    a_run(ledger, layout=MIG)
    where = {"nvml": node.settings.nvml, "nvml_state": node.settings.nvml_state}
    with pytest.raises(ResetRequired, match=r"nvidia-smi --gpu-reset -i 0.*the layout is as it was before"):
        execute("provision", **where)
    (lease,) = leases.live_leases(ledger)
    assert lease.state == "abandoned"
    control.set_mode(node.file, True)
    assert len(execute("provision", **where).facts["slots"]) == 3


def test_a_failed_stage_leaves_its_lease_to_the_reaper(ledger, node, execute, settings):
    before = node.picture()
    a_run(ledger, layout=MIG)
    control.fail(node.file, "nvmlGpuInstanceCreateComputeInstance", pynvml.NVML_ERROR_UNKNOWN, nth=3)
    with pytest.raises(StageFailed, match=r"create .* of GPU 0: .*; the layout is as it was before"):
        execute("provision")
    (lease,) = leases.live_leases(ledger)
    assert (lease.state, node.picture()) == ("abandoned", before)
    assert lease.reason.startswith("provision failed: ")
    assert [one.released for one in reap(settings).reaped] == [lease.lease_id]
    assert held(ledger) == []


def test_the_reaper_brings_the_layout_back_before_it_gives_the_devices_away(ledger, node, execute, settings):
    node.put(1, ("2g.20gb", 2))
    before = node.picture()
    a_run(ledger, layout={"mig": {"3g.40gb": 1}})
    execute("provision")
    report = reap(settings, "run-1", force=True)
    assert (report.reaped[0].missing, node.picture(), held(ledger)) == ("", before, [])


def test_an_orphan_of_ours_is_completed_and_goes_with_a_restore(ledger, node, execute):
    a_run(ledger, layout={**MIG, "gpus": [0]})
    execute("provision")
    with node.file.changing() as state:
        state["gpus"][0]["instances"][0]["compute"] = []
    result = execute("provision")
    assert (result.changed, len(set(slot_uuids(result)))) == (True, 3)
    with node.file.changing() as state:
        state["gpus"][0]["instances"][0]["compute"] = []
    execute("restore")
    assert node.layout() == []


def test_who_may_not_change_gpus_is_told_what_is_missing(ledger, node, execute):
    with node.file.changing() as state:
        state["needs_root"] = True
    a_run(ledger, layout=MIG)
    with pytest.raises(NoRights, match="QWEN_PIPELINE_MIG_COMMAND"):
        execute("provision")


def test_two_runs_hold_different_gpus_of_one_node(ledger, node, execute):
    for run_id in ("a", "b", "c"):
        a_run(ledger, run_id, layout={"mig": {"3g.40gb": 2}, "gpus": 1})
    execute("provision", "a")
    execute("provision", "b")
    devices = [lease.devices for lease in leases.live_leases(ledger)]
    assert {gpu.uuid for gpu in inventory.read(node.settings).gpus} == {
        one for each in devices for one in each
    }
    with pytest.raises(Busy, match=r"is leased to run (a|b) until"):
        execute("provision", "c")
    execute("restore", "a")
    execute("provision", "c")
    assert [run_id for run_id, _ in held(ledger)] == ["b", "c"]


def test_full_gpus_are_leased_by_uuid(ledger, execute, tmp_path):
    node = a_node(tmp_path, "h100-80*4", mig=False)
    a_run(ledger, layout={"tensor_parallel": 2, "gpus": 2})
    found = execute("provision", nvml=node.settings.nvml, nvml_state=node.settings.nvml_state)
    uuids = [gpu.uuid for gpu in inventory.read(node.settings).gpus[:2]]
    assert [slot["stands_for"]["uuids"] for slot in found.facts["slots"]] == [uuids]
