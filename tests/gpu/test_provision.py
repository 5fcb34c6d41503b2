"""Provision and restore: what a run holds on its node, from the first lease to none."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pynvml
import pytest

from tasks import settings as deployment
from tasks import stages
from tasks.cli import main as cli
from tasks.contract import Context
from tasks.errors import Busy, InputError, StageFailed
from tasks.gpu import change, cutting, inventory
from tasks.gpu.cutting import NoRights, ResetRequired
from tasks.gpu.simulated import control
from tasks.ledger import leases, load, take
from tasks.node import processes
from tasks.reap import reap
from tests.gpu.node import a_node
from tests.runs import a_run, environment_of, open_ledger, settings_of, wait_until

CORES = (0, 1, 2)
MIG = {"mig": {"3g.40gb": 1, "1g.10gb": 2}}


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr(inventory, "available_cores", lambda: CORES)


@pytest.fixture
def node(tmp_path):
    return a_node(tmp_path, "h100-80*2", mig=True)


@pytest.fixture
def settings(tmp_path, database_url, node):
    simulated = {"nvml": node.settings.nvml, "nvml_state": node.settings.nvml_state}
    own = settings_of(tmp_path, database_url, lease_wait_s=0, **simulated)
    yield own
    processes.end_all(lambda: processes.find(deployment=own.deployment), grace_s=0)


@pytest.fixture
def ledger(database_url):
    with open_ledger(database_url) as opened:
        yield opened


@pytest.fixture
def run(ledger):
    return a_run(ledger, layout={"cpu": 2})


@pytest.fixture
def execute(settings):
    """Execute a stage of a run here, or on another node."""

    def act(stage, run_id="run-1", **changes):
        return stages.execute(stage, run_id, settings=settings.model_copy(update=changes))

    return act


def prepare(ledger, to_do, run_id="run-1"):
    claim, _ = take(ledger, run_id, "prepare", frozenset())
    claim.finish("done", "made by the test", {"to_do": to_do})


def held(ledger):
    return [(lease.run_id, lease.devices) for lease in leases.live_leases(ledger)]


def slot_uuids(result):
    return [slot["stands_for"]["uuid"] for slot in result.facts["slots"]]


# Cores


def test_a_cpu_layout_leases_cores_and_leaves_mig_alone(ledger, run, execute, node):
    prepare(ledger, to_do=10)
    node.library.calls.clear()
    result = execute("provision")
    assert result.changed
    assert result.message.endswith("2 worker slot(s); this layout uses no GPU: MIG is left as it is")
    (lease,) = leases.live_leases(ledger)
    assert result.facts == {
        "lease_id": lease.lease_id,
        "node": "local",
        "simulated": False,
        "slots": [
            {"slot_id": "cpu-0", "kind": "cpu", "cores": [0, 1]},
            {"slot_id": "cpu-1", "kind": "cpu", "cores": [2]},
        ],
    }
    assert held(ledger) == [("run-1", ("cpu:0", "cpu:1", "cpu:2"))]
    assert node.library.calls.total() == 0


def test_provisioning_again_changes_nothing(ledger, run, execute):
    first = execute("provision")
    again = execute("provision")
    assert (again.changed, again.facts) == (False, first.facts)
    assert (
        again.message
        == f"nothing to do: this run holds lease {first.facts['lease_id']} on cpu:0, cpu:1, cpu:2 already"
    )


def test_no_device_is_taken_when_no_row_is_to_do(ledger, run, execute):
    prepare(ledger, to_do=0)
    result = execute("provision")
    assert (result.changed, result.message) == (
        False,
        "nothing to do: no row is left to do, so no device is taken",
    )
    assert result.facts == {"lease_id": None, "node": "local", "simulated": False, "slots": []}
    assert held(ledger) == []


def test_a_lease_that_runs_out_soon_is_renewed(ledger, run, execute):
    first = execute("provision", lease_s=60.0)
    again = execute("provision", lease_s=600.0)
    assert again.changed
    assert again.facts == first.facts
    assert leases.lease_of(ledger, "run-1", "local").left_s > 500


def test_a_run_comes_back_for_the_lease_that_it_abandoned(ledger, run, execute):
    first = execute("provision")
    claim, _ = take(ledger, "run-1", "start", frozenset())
    leases.abandon(claim, first.facts["lease_id"], "start failed")
    again = execute("provision")
    assert (again.changed, again.facts) == (True, first.facts)


def test_another_run_is_busy_until_the_first_is_restored(ledger, run, execute):
    a_run(ledger, "run-2", layout={"cpu": 1})
    execute("provision")
    with pytest.raises(Busy, match="cpu:0, cpu:1, cpu:2 of local are leased to run run-1 until"):
        execute("provision", "run-2")
    execute("restore")
    assert execute("provision", "run-2").changed
    assert held(ledger) == [("run-2", ("cpu:0", "cpu:1", "cpu:2"))]


def test_more_workers_than_cores_are_refused(ledger, execute):
    a_run(ledger, layout={"cpu": 4})
    with pytest.raises(InputError, match=r"layout\.cpu: 4 workers .* may use 3"):
        execute("provision")
    assert held(ledger) == []


def test_a_leased_core_that_is_gone_is_not_worked_around(ledger, run, execute, monkeypatch):
    execute("provision")
    monkeypatch.setattr(inventory, "available_cores", lambda: (0, 1))
    with pytest.raises(StageFailed, match=r"holds cpu:2, which this node does not offer.*restore"):
        execute("provision")
    execute("restore")
    assert execute("provision").facts["slots"][1]["cores"] == [1]


@pytest.mark.parametrize("stage", ["provision", "restore"])
def test_devices_are_taken_and_given_back_on_their_own_node_only(ledger, run, execute, stage):
    with pytest.raises(InputError, match="node: the spec asks for 'local', and this host is 'dgx-9'"):
        execute(stage, node="dgx-9")


def test_restore_ends_the_lease_and_again_changes_nothing(ledger, run, execute):
    execute("provision")
    assert execute("restore").changed
    assert held(ledger) == []
    again = execute("restore")
    assert (again.changed, again.message) == (False, "nothing to do: this run holds no lease on local")


@pytest.mark.parametrize("part", ["keeper", "worker-11"])
def test_restore_keeps_the_lease_while_a_process_of_the_pool_lives(
    ledger, run, execute, settings, tmp_path, part
):
    execute("provision")
    marks = {
        processes.DEPLOYMENT: settings.deployment,
        processes.PART: f"run-1/{part}",
        "PATH": os.environ["PATH"],
    }
    child = processes.spawn(["sleep", "1000"], marks, tmp_path / "log.txt")
    with pytest.raises(StageFailed, match=rf"process\(es\) {child.pid} of this run's pool still live"):
        execute("restore")
    assert held(ledger) == [("run-1", ("cpu:0", "cpu:1", "cpu:2"))]
    child.kill()
    child.wait()
    execute("restore")
    assert held(ledger) == []


# GPUs


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
    with pytest.raises(Busy, match="0 of 2 are not leased"):
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


# In line


def test_waiting_runs_are_served_in_order_of_arrival(ledger, run, execute):
    execute("provision")
    for run_id in ("run-2", "run-3"):
        a_run(ledger, run_id, layout={"cpu": 1})
    with pytest.raises(Busy, match="leased to run run-1"):
        execute("provision", "run-2")
    with pytest.raises(Busy, match=r"1 run\(s\) wait before this one, first run-2.*number 2 in line"):
        execute("provision", "run-3")
    execute("restore")
    with pytest.raises(Busy, match=r"1 run\(s\) wait before this one, first run-2"):
        execute("provision", "run-3")
    assert execute("provision", "run-2").changed
    execute("restore", "run-2")
    assert execute("provision", "run-3").changed


def test_who_waits_for_other_gpus_is_not_in_the_way(ledger, node, execute):
    for run_id, index in (("a", 0), ("b", 0), ("c", 1)):
        a_run(ledger, run_id, layout={"mig": {"3g.40gb": 1}, "gpus": [index]})
    execute("provision", "a")
    with pytest.raises(Busy):
        execute("provision", "b")
    assert execute("provision", "c").changed


def test_a_run_that_went_away_loses_its_place(ledger, run, execute):
    execute("provision")
    for run_id in ("run-2", "run-3"):
        a_run(ledger, run_id, layout={"cpu": 1})
        with pytest.raises(Busy):
            execute("provision", run_id, lease_place_s=0 if run_id == "run-2" else 300)
    execute("restore")
    assert execute("provision", "run-3").changed


def test_a_stage_waits_until_its_turn_comes(ledger, run, execute, settings, monkeypatch):
    monkeypatch.setattr("tasks.gpu.provision._POLL_S", 0.05)
    execute("provision")
    a_run(ledger, "run-2", layout={"cpu": 1})
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(execute("provision", "run-2", lease_wait_s=60.0)), daemon=True
    )
    waiting.start()

    def has_place():
        with ledger.transaction() as connection:
            return connection.execute("select run_id from lease_place").fetchall()

    wait_until(has_place)
    execute("restore")
    waiting.join(60)
    assert found[0].changed
    assert held(ledger) == [("run-2", ("cpu:0", "cpu:1", "cpu:2"))]
    assert has_place() == []


# What a person sees


def test_a_dry_run_prints_what_would_change_and_takes_nothing(ledger, node, settings, tmp_path):
    node.put(0, ("1g.10gb", 4))
    kept = node.uuids()["1g.10gb"]
    before = node.picture()
    spec = tmp_path / "run.json"
    document = a_run(ledger, layout={**MIG, "gpus": [0]}).spec.model_dump(mode="json")
    spec.write_text(json.dumps(document))
    environment = {
        **environment_of(settings),
        "QWEN_PIPELINE_NVML": settings.nvml,
        "QWEN_PIPELINE_NVML_STATE": str(settings.nvml_state),
    }
    said = subprocess.run(
        [
            sys.executable,
            "-m",
            "tasks.cli.main",
            "provision",
            "--spec",
            spec,
            "--run",
            "new",
            "--dry-run",
            "--json",
        ],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    plan = json.loads(said.stdout)
    uuid = node.gpu().uuid
    assert plan["simulated"] is True
    assert plan["keep"] == [
        {
            "device": uuid,
            "index": 0,
            "profile": "1g.10gb",
            "placement": {"start": 4, "size": 1},
            "uuids": kept,
        }
    ]
    assert [(one["profile"], one["placement"]) for one in plan["create"]] == [
        ("3g.40gb", {"start": 0, "size": 4}),
        ("1g.10gb", {"start": 5, "size": 1}),
    ]
    assert (plan["destroy"], plan["mode"], node.picture(), held(ledger)) == ([], [], before, [])
    assert "SIMULATED GPUs" in said.stderr


def test_what_differs_is_said_in_words(ledger, node, execute, settings):
    a_run(ledger, layout={"mig": {"3g.40gb": 1}, "gpus": [0]})
    execute("provision")
    (lease,) = leases.live_leases(ledger)
    with node.file.changing() as state:
        state["gpus"][0]["instances"] = []
    claim, _ = take(ledger, "run-1", "provision", frozenset({"provision"}))
    context = Context(load(ledger, "run-1"), claim, settings, lambda _: None)
    assert cutting.missing(context, lease, inventory.read(settings)) == ["GPU 0: create 3g.40gb at 0-3"]
