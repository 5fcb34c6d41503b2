"""The simulated driver through the real pynvml: it refuses what hardware refuses, and says that it is simulated."""

import ctypes
import subprocess
import sys

import pynvml
import pytest

from tasks.errors import InputError
from tasks.gpu import inventory, nvml
from tasks.gpu.simulated import control
from tasks.settings import REPOSITORY, Settings
from tests.gpu.node import a_node

THREE_G, ONE_G = 9, 19


@pytest.fixture
def opened(node):
    """NVML, open on a node with MIG on; the handle of its first GPU."""
    with nvml.opened(node.settings):
        yield pynvml.nvmlDeviceGetHandleByIndex(0)


def create(handle, profile, start, size):
    place = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
    return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile, ctypes.byref(place))


def mig_device(handle, index):
    return pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))


def test_everything_that_it_names_says_that_it_is_simulated(node, opened):
    assert pynvml.nvmlDeviceGetName(opened) == "NVIDIA H100 80GB HBM3 (simulated)"
    assert pynvml.nvmlSystemGetDriverVersion().endswith("-simulated")
    assert inventory.read(node.settings).describe().startswith("SIMULATED GPUs: 2 GPU(s)")


def test_it_is_never_chosen_by_half_a_wish(tmp_path):
    state = tmp_path / "node"
    for settings, message in [
        (Settings(home=tmp_path, nvml="sim:a100-80"), "name one with QWEN_PIPELINE_NVML_STATE"),
        (Settings(home=tmp_path, nvml_state=state), "set both for a simulated node, or neither"),
        (Settings(home=tmp_path, nvml="sim:a100", nvml_state=state), "one of a100-40, a100-80"),
        (Settings(home=tmp_path, nvml="sim:a100-80*99", nvml_state=state), "1 to 16 GPUs"),
        (Settings(home=tmp_path, nvml="simulated", nvml_state=state), r"`driver`, or `sim:PRODUCT"),
        (Settings(home=tmp_path, nvml="sim:a100-80", nvml_state=tmp_path / "no" / "x"), "there is no folder"),
    ]:
        with pytest.raises(InputError, match=message):
            inventory.read(settings)
    assert not state.exists()


def test_a_file_that_holds_another_node_is_refused(node):
    other = node.settings.model_copy(update={"nvml": "sim:a100-40"})
    with pytest.raises(InputError, match=r"holds h100-80\*2: name another file"):
        inventory.read(other)


def test_the_real_driver_is_asked_again_after_a_simulated_one(node, tmp_path):
    inventory.read(node.settings)
    assert inventory.read(Settings(home=tmp_path)).why == "no NVIDIA driver on this node"


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda gpu: create(gpu, THREE_G, 2, 4), pynvml.NVMLError_InvalidArgument),
        (lambda gpu: create(gpu, THREE_G, 4, 2), pynvml.NVMLError_InvalidArgument),
        (lambda gpu: create(gpu, 77, 0, 1), pynvml.NVMLError_InvalidArgument),
        (lambda gpu: create(gpu, THREE_G, 0, 4), pynvml.NVMLError_InsufficientResources),
        (lambda gpu: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 5), pynvml.NVMLError_NotFound),
        (lambda gpu: pynvml.nvmlDeviceGetGpuInstanceById(gpu, 5), pynvml.NVMLError_NotFound),
        (lambda gpu: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 5), pynvml.NVMLError_NotSupported),
        (lambda gpu: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 18), pynvml.NVMLError_InvalidArgument),
        (lambda gpu: pynvml.nvmlDeviceGetFanSpeed(gpu), pynvml.NVMLError_FunctionNotFound),
    ],
)
def test_it_refuses_what_hardware_refuses(node, opened, act, error):
    node.put(0, ("1g.10gb", 3))
    with pytest.raises(error):
        act(opened)


def test_a_structure_without_byref_does_not_pass_as_it_would_crash(opened):
    with pytest.raises(TypeError, match="byref"):
        pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(
            opened, THREE_G, pynvml.c_nvmlGpuInstancePlacement_t(0, 4)
        )


def test_free_slices_in_the_wrong_places_hold_no_large_instance(node, opened):
    node.put(0, ("1g.10gb", 1), ("1g.10gb", 5))
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(opened, THREE_G) == 0
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(opened, ONE_G) == 5
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        pynvml.nvmlDeviceCreateGpuInstance(opened, THREE_G)


def test_an_instance_goes_only_without_compute_instances_and_processes(node, opened):
    instance = create(opened, THREE_G, 4, 4)
    part = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 2)
    gi = pynvml.nvmlGpuInstanceGetInfo(instance).id
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlGpuInstanceDestroy(instance)
    control.start_process(node.file, 0, gi)
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlComputeInstanceDestroy(part)
    control.end_processes(node.file)
    pynvml.nvmlComputeInstanceDestroy(part)
    pynvml.nvmlGpuInstanceDestroy(instance)
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlGpuInstanceGetInfo(instance)


def test_uuids_change_when_a_device_is_made_again_and_indices_have_holes(node):
    node.put(0, ("1g.10gb", 0), ("1g.10gb", 1), ("1g.10gb", 2))
    with nvml.opened(node.settings):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        before = [mig_device(gpu, index) for index in range(3)]
        middle = pynvml.nvmlDeviceGetGpuInstanceById(gpu, node.gi(0, 1))
        pynvml.nvmlComputeInstanceDestroy(pynvml.nvmlGpuInstanceGetComputeInstanceById(middle, 0))
        assert mig_device(gpu, 1) == before[1], "a destroyed device stays enumerable in this session"
    with nvml.opened(node.settings):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert (mig_device(gpu, 0), mig_device(gpu, 2)) == (before[0], before[2])
        with pytest.raises(pynvml.NVMLError_NotFound):
            mig_device(gpu, 1)
        pynvml.nvmlGpuInstanceCreateComputeInstance(
            pynvml.nvmlDeviceGetGpuInstanceById(gpu, node.gi(0, 1)), 0
        )
        assert mig_device(gpu, 1) not in before


def test_handles_of_an_earlier_session_are_invalid(node):
    with nvml.opened(node.settings):
        old = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetUUID(old)
    with nvml.opened(node.settings), pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetUUID(old)


@pytest.mark.parametrize(
    ("product", "status", "now", "after_reboot"),
    [
        ("a100-80*1", pynvml.NVML_ERROR_RESET_REQUIRED, [0, 1], [1, 1]),
        ("h100-80*1", pynvml.NVML_SUCCESS, [1, 1], [0, 0]),
    ],
)
def test_mig_mode_is_pending_on_ampere_and_immediate_but_lost_on_hopper(
    make_node, product, status, now, after_reboot
):
    node = make_node(product, mig=False)
    with nvml.opened(node.settings):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == status, "it is returned, not raised"
        assert pynvml.nvmlDeviceGetMigMode(gpu) == now
        control.reboot(node.file)
        assert pynvml.nvmlDeviceGetMigMode(gpu) == after_reboot


def test_only_who_has_the_rights_may_change_it(node, opened, monkeypatch):
    with node.file.changing() as state:
        state["needs_root"] = True
    for act in (
        lambda: create(opened, THREE_G, 0, 4),
        lambda: pynvml.nvmlDeviceSetMigMode(opened, 0),
        lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(opened),
    ):
        with pytest.raises(pynvml.NVMLError_NoPermission):
            act()
    monkeypatch.setenv("QWEN_PIPELINE_NVML_AS_ROOT", "1")
    create(opened, THREE_G, 0, 4)


def test_a_fault_comes_at_the_nth_call_in_whichever_process(node, opened):
    control.fail(node.file, "nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_UNKNOWN, nth=2)
    create(opened, ONE_G, 0, 1)
    with pytest.raises(pynvml.NVMLError_Unknown):
        create(opened, ONE_G, 1, 1)
    create(opened, ONE_G, 1, 1)


def test_processes_share_a_node(node, tmp_path):
    code = (
        "from pathlib import Path; import sys; from tests.gpu.node import a_node;"
        "a_node(Path(sys.argv[1]), 'h100-80*2', True).put(0, ('1g.10gb', int(sys.argv[2])))"
    )
    makers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(start)], cwd=REPOSITORY)
        for start in (0, 3, 6)
    ]
    assert [maker.wait(60) for maker in makers] == [0, 0, 0]
    assert node.layout() == ["1g.10gb@0", "1g.10gb@3", "1g.10gb@6"]


@pytest.mark.parametrize(
    ("product", "names"),
    [
        ("a100-40", "1g.5gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb 1g.5gb+me 1g.10gb"),
        ("a100-80", "1g.10gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb 1g.10gb+me 1g.20gb"),
        ("h100-80", "1g.10gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb 1g.10gb+me 1g.20gb"),
        ("h200-141", "1g.18gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb 1g.18gb+me 1g.35gb"),
        ("b200-180", "1g.23gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb 1g.23gb+me 1g.45gb"),
    ],
)
def test_each_product_offers_what_its_guide_says(tmp_path, product, names):
    gpu = a_node(tmp_path, f"{product}*1", mig=False).gpu()
    assert " ".join(profile.name for profile in gpu.cut.profiles) == names
    assert [profile.profile_id for profile in gpu.cut.profiles] == [19, 14, 9, 5, 0, 20, 15]
    assert [profile.most for profile in gpu.cut.profiles] == [7, 3, 2, 1, 1, 1, 4]
