"""Changes that fail: taken back, or what is left is said. Each report of the field that is about changing is here."""

import os
from collections import Counter
from contextlib import ExitStack

import pynvml

from tasks.gpu import change, inventory
from tasks.gpu.layouts import Step, spot_of
from tasks.gpu.simulated import control
from tests.runs import outputs, python, wait_until

COUNTS = {"3g.40gb": 1, "1g.10gb": 2}


def destroy_all(node, index=0):
    gpu = node.gpu(index)
    return [Step("destroy", gpu.uuid, spot_of(one)) for one in gpu.instances]


def test_mode_that_waits_for_a_reset_stops_before_anything_is_created(make_node):
    """gpu-operator #1606: a reset is not supported there, and creation must not be tried."""
    node = make_node("a100-80*1", mig=False)
    before = node.picture()
    report = node.cut(COUNTS)
    assert report.kind == "pending"
    assert "goes on only with a reset or reboot" in report.error
    assert "nvidia-smi --gpu-reset -i 0" in report.error
    assert node.library.calls["nvmlDeviceCreateGpuInstanceWithPlacement"] == 0
    assert (node.picture(), report.left) == (before, ()), "nor is it left pending"


def test_a_mode_change_that_somebody_asked_for_stays_pending(make_node):
    node = make_node("a100-80*1", mig=False)
    control.put(node.file, 0, mig_pending=True)
    before = node.picture()
    assert node.cut(COUNTS).kind == "pending"
    assert node.picture() == before


def test_mode_that_the_display_driver_holds_names_it_and_is_tried_once(make_node):
    """mig-parted #181."""
    node = make_node("h100-80*1", mig=False)
    control.put(node.file, 0, drm_holds=True)
    before = node.picture()
    report = node.cut(COUNTS)
    assert (report.kind, report.changes, report.left) == ("busy", 0, ())
    assert "held by kernel module nvidia_drm: stop that" in report.error
    assert node.library.calls["nvmlDeviceSetMigMode"] == 2, "once there and once back"
    assert node.picture() == before


def test_who_holds_an_instance_without_a_process_is_waited_for_a_little(node):
    """DCGM #276: it lets go after a moment."""
    node.put(0, ("3g.40gb", 0))
    control.put(node.file, 0, hidden_clients=3)
    assert change.carry_out(destroy_all(node), node.settings).error == ""
    assert node.layout() == []


def test_who_does_not_let_go_is_named_and_what_was_taken_apart_is_made_whole(node):
    node.put(0, ("3g.40gb", 0), ("1g.10gb", 4))
    before = node.picture()[1]
    control.put(node.file, 0, hidden_clients=-1)
    report = change.carry_out(destroy_all(node), node.settings)
    assert report.kind == "busy"
    assert "no process is listed on it; held by nv-hostengine (DCGM)" in report.error
    assert (node.picture()[1], report.left) == (before, ())


def test_success_is_not_believed_where_remnants_stay(node):
    """go-nvml #146."""
    node.put(0, ("3g.40gb", 0))
    control.put(node.file, 0, leaves_remnants=1)
    report = change.carry_out(destroy_all(node), node.settings)
    assert report.kind == "failed"
    assert "still listed although destroying it was reported as done" in report.error
    assert report.left == (), "its compute instance is there again"
    control.put(node.file, 0, leaves_remnants=-1)
    control.fail(node.file, "nvmlGpuInstanceCreateComputeInstance", pynvml.NVML_ERROR_UNKNOWN, times=-1)
    report = change.carry_out(destroy_all(node), node.settings)
    assert report.left == ("GPU 0: 3g.40gb at 0-3 is missing",)


def test_a_gpu_instance_whose_compute_instance_failed_is_taken_back(node):
    """dra-driver-nvidia-gpu #1452: it has no MIG device by which a rollback could find it."""
    control.fail(
        node.file, "nvmlGpuInstanceCreateComputeInstance", pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, nth=2
    )
    report = node.cut(COUNTS)
    assert report.kind == "failed"
    assert "create 1g.10gb at 4 of GPU 0" in report.error
    assert (node.layout(), report.left) == ([], ())


def test_what_was_destroyed_comes_back_when_a_later_step_fails(node):
    node.put(0, ("1g.10gb", 0), ("1g.10gb", 1), ("2g.20gb", 4))
    before = node.picture()[1]
    control.fail(node.file, "nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_UNKNOWN, nth=1)
    report = node.cut({"7g.80gb": 1}, replace_foreign=True)
    assert (report.kind, report.left, node.picture()[1]) == ("failed", (), before)


def test_of_a_gpu_that_is_lost_in_a_change_it_is_said_that_nothing_is_known(node):
    gone = {"nvmlDeviceGetHandleByIndex_v2": lambda number: number % 2 == 0}  # the second of two
    asked = Counter()

    def fault(name, _):
        asked[name] += 1
        begun = node.library.calls["nvmlDeviceCreateGpuInstanceWithPlacement"] > 0
        lost = begun and name in gone and gone[name](asked[name])
        return pynvml.NVML_ERROR_GPU_IS_LOST if lost else None

    steps = [*node.steps(COUNTS, 0), *node.steps(COUNTS, 1)]
    node.library.fault = fault
    report = change.carry_out(steps, node.settings)
    uuid = steps[-1].gpu_uuid
    assert (report.kind, report.error) == ("failed", f"GPU {uuid} does not answer any more")
    assert report.left == ("GPU 1: what is left is not known: it does not answer",)
    assert node.layout() == [], "of the other it was taken back"


def test_the_library_is_initialised_anew_before_the_result_is_read(node):
    """libcudacxx #224: destroyed devices stay enumerable otherwise."""
    node.put(0, ("3g.40gb", 0))
    old = node.uuids()["3g.40gb"]
    assert change.carry_out(destroy_all(node), node.settings).error == ""
    assert node.put(0, ("1g.10gb", 0)).error == ""
    assert old[0] not in [uuid for uuids in node.uuids().values() for uuid in uuids]


def test_a_process_that_appears_after_planning_keeps_its_instance(node):
    node.put(0, ("3g.40gb", 0), ("1g.10gb", 4))
    steps, before = destroy_all(node), node.picture()[1]
    control.start_process(node.file, 0, node.gi(0, 4), pid=77)
    report = change.carry_out(steps, node.settings)
    assert (report.kind, report.changes, node.picture()[1]) == ("busy", 0, before)
    assert "1g.10gb (GPU instance 2) of GPU 0 is in use by pid 77" in report.error


def test_missing_rights_are_said_before_the_first_change(node):
    with node.file.changing() as state:
        state["needs_root"] = True
    report = node.cut(COUNTS)
    assert (report.kind, report.changes) == ("rights", 0)
    assert "QWEN_PIPELINE_MIG_COMMAND" in report.error
    assert node.library.calls["nvmlDeviceCreateGpuInstanceWithPlacement"] == 0


def test_steps_done_already_are_left_as_they_are(node):
    gpu = node.gpu()
    node.put(0, ("3g.40gb", 0), ("1g.10gb", 4))
    done = [Step("create", gpu.uuid, spot_of(one)) for one in node.gpu().instances]
    before = node.uuids()
    report = change.carry_out(done, node.settings)
    assert (report.changes, node.uuids()) == (0, before)


def test_a_change_that_nobody_wants_any_more_stops_where_it_is(node):
    answers = iter([True])
    report = change.carry_out(node.steps(COUNTS), node.settings, lambda: next(answers, False))
    assert (report.kind, report.changes, node.layout()) == ("failed", 1, ["3g.40gb@0"])
    assert "called off before the step: create 1g.10gb at 4" in report.error
    assert report.left == ("GPU 0: 3g.40gb (GPU instance 1) at 0-3 was not there",), "not even taken back"


def test_every_change_takes_two_calls_and_destroying_one_four(node):
    node.library.calls.clear()
    assert node.put(0, ("3g.40gb", 0), ("1g.10gb", 4), ("1g.10gb", 5)).error == ""
    calls = node.library.calls
    assert calls["nvmlDeviceCreateGpuInstanceWithPlacement"] == 3
    assert calls["nvmlGpuInstanceCreateComputeInstance"] == 3
    calls.clear()
    change.carry_out(destroy_all(node), node.settings)
    assert calls["nvmlGpuInstanceDestroy"] == calls["nvmlComputeInstanceDestroy"] == 3


def test_two_processes_that_change_one_gpu_do_it_one_after_the_other(node, tmp_path):
    code = (
        "from pathlib import Path; import sys; from tasks.gpu import change; from tests.gpu.node import a_node;"
        "node = a_node(Path(sys.argv[1]), 'h100-80*2', True, lock_wait_s=60);"
        "steps = node.steps({'3g.40gb': 1, '1g.10gb': 2});"
        "print('planned', flush=True); input();"
        "print(change.carry_out(steps, node.settings).kind)"
    )
    with ExitStack() as stack:
        makers = [stack.enter_context(python(code, str(tmp_path))) for _ in range(3)]
        for maker in makers:
            wait_until(lambda maker=maker: maker.stdout.readline() == "planned\n")
        for maker in makers:
            maker.stdin.write("\n")
            maker.stdin.flush()
        ended = [text.strip() for text in outputs(makers)]
    # Whoever planned on an empty GPU finds the same places taken by the same instances: done, or refused whole.
    assert set(ended) <= {"done", "failed"}
    assert "done" in ended
    assert sorted(node.layout()) == ["1g.10gb@4", "1g.10gb@5", "3g.40gb@0"]
    assert not any(one.is_orphan for one in node.gpu().instances)
    assert os.listdir(tmp_path)


def test_inventory_sees_what_runs_where(node):
    node.put(0, ("3g.40gb", 4))
    control.start_process(node.file, 0, node.gi(0, 4), pid=5)
    control.start_process(node.file, 1, pid=6)
    first, second = inventory.read(node.settings).gpus
    assert [str(one) for one in first.instances[0].processes] == ["pid 5 (/usr/bin/training)"]
    assert [process.pid for process in second.processes] == [6]
