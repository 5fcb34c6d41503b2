"""The helper that changes GPUs as root: what it does and refuses, and that it ends with its caller."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from tasks.errors import StageFailed
from tasks.gpu import change, privileged
from tasks.gpu.layouts import Step, spot_of
from tasks.gpu.simulated import control
from tasks.node import lock, processes
from tasks.settings import REPOSITORY
from tests.runs import python, wait_until

CALL = """
import sys
from pathlib import Path
from tasks.gpu import privileged
from tests.gpu.node import a_node
node = a_node(Path(sys.argv[1]), "h100-80*2", True, mig_command=tuple(sys.argv[2:]))
privileged.carry_out(node.steps({"3g.40gb": 1}), node.settings)
"""


@pytest.fixture
def helped(node):
    """A node that only the helper may change: here it gets its rights from a variable, as from sudo."""
    with node.file.changing() as state:
        state["needs_root"] = True
    environment = [
        f"QWEN_PIPELINE_{name}={value}"
        for name, value in [
            ("NVML_AS_ROOT", 1),
            ("NVML", node.settings.nvml),
            ("NVML_STATE", node.settings.nvml_state),
            ("HOME", node.settings.home),
        ]
    ]
    command = ("env", *environment, sys.executable, "-I", "-m", "tasks.gpu.privileged")
    return node.settings.model_copy(update={"mig_command": command})


def test_the_helper_does_what_the_stage_may_not(node, helped):
    steps = node.steps({"3g.40gb": 1})
    assert privileged.carry_out(steps, node.settings).kind == "rights"
    assert privileged.carry_out(steps, helped) == change.Report(changes=1)
    assert node.layout() == ["3g.40gb@0"]


@pytest.mark.parametrize(
    "request_",
    [
        "not JSON",
        {"steps": [{"do": "reset", "gpu_uuid": "GPU-" + "0" * 36}]},
        {"steps": [{"do": "mode", "gpu_uuid": "../../etc", "on": True}]},
        {"steps": [], "settings": {"home": "/"}},
        {"steps": [{"do": "create", "gpu_uuid": "GPU-" + "0" * 36}]},
        {"steps": [{"do": "mode", "gpu_uuid": "GPU-" + "0" * 36, "on": "yes"}]},
    ],
)
def test_the_helper_refuses_what_is_no_plan(helped, request_):
    text = request_ if isinstance(request_, str) else json.dumps(request_)
    ran = subprocess.run(
        helped.mig_command, input=text, capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    report = json.loads(ran.stdout)
    assert report["kind"] == "failed"
    assert "the helper refuses the request" in report["error"]


def test_the_helper_validates_a_plan_against_what_it_sees_itself(node, helped, monkeypatch):
    monkeypatch.setenv("QWEN_PIPELINE_NVML_AS_ROOT", "1")
    node.put(0, ("3g.40gb", 0))
    control.start_process(node.file, 0, node.gi(0, 0))
    before = node.picture()
    gpu = node.gpu()
    there = spot_of(gpu.instances[0])
    wrong = change.Spot(change.instances.Placement(2, 4), there.profile_id, there.name)
    for step, kind in [
        (Step("destroy", gpu.uuid, there), "busy"),
        (Step("create", gpu.uuid, wrong), "failed"),
        (Step("mode", gpu.uuid, on=False), "busy"),
        (Step("mode", "GPU-" + "0" * 36, on=False), "failed"),
    ]:
        assert privileged.carry_out([step], helped).kind == kind
    assert node.picture() == before


def test_a_helper_that_does_not_answer_is_explained(node):
    for command, message in [
        (("/nowhere/helper",), "cannot be started"),
        (
            ("sh", "-c", "echo 'sudo: a password is required' >&2; exit 1"),
            "a password is required.*sudoers line",
        ),
    ]:
        with pytest.raises(StageFailed, match=message):
            privileged.carry_out([], node.settings.model_copy(update={"mig_command": command}))


def test_a_helper_whose_caller_was_killed_before_it_had_the_lock_changes_nothing(node, helped, tmp_path):
    pid_file, before = tmp_path / "pid", node.picture()
    # As sudo does, it leaves standard input to the helper.
    wrapper = f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec {shlex.join(helped.mig_command)}"
    with (
        lock.held(change.lock_path(node.settings), "somebody else's change", 0),
        python(CALL, str(tmp_path), "sh", "-c", wrapper) as caller,
    ):
        wait_until(pid_file.exists)
        helper = processes.identify(int(pid_file.read_text()))
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        assert helper is not None
        assert helper.is_alive(), "it does not even have the lock"
    wait_until(lambda: not helper.is_alive())
    assert node.picture() == before


def test_a_helper_that_takes_too_long_is_called_off_and_its_report_is_believed(node, monkeypatch):
    monkeypatch.setattr(privileged, "_HELPER_TIMEOUT_S", 0.1)
    report = json.dumps({"error": "called off", "kind": "failed", "changes": 1, "left": ["a slice"]})
    command = ("sh", "-c", f"cat > /dev/null; echo {shlex.quote(report)}")
    told = privileged.carry_out([], node.settings.model_copy(update={"mig_command": command}))
    assert told == change.Report("called off", "failed", 1, ("a slice",))


def test_a_helper_that_hangs_is_named_and_not_waited_for_without_bound(node, monkeypatch, tmp_path):
    monkeypatch.setattr(privileged, "_HELPER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(privileged, "_CALLED_OFF_S", 0.1)
    pid_file = tmp_path / "pid"
    command = ("sh", "-c", f"echo $$ > {pid_file}; exec sleep 600")
    try:
        with pytest.raises(StageFailed, match=r"\(pid \d+\) did not end in 0 s and hangs") as told:
            privileged.carry_out([], node.settings.model_copy(update={"mig_command": command}))
        assert f"(pid {pid_file.read_text().strip()})" in str(told.value)
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
