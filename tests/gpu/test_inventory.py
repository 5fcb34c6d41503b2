"""What a node has, as the driver tells, and what is held against a GPU."""

import pynvml
import pytest

from tasks.errors import StageFailed
from tasks.gpu import drawing, health, inventory
from tasks.gpu.simulated import control
from tasks.settings import Settings


def fail_with(code):
    def fail(*_):
        raise pynvml.NVMLError(code)

    return fail


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_node_without_a_driver_has_no_gpu_and_says_why(tmp_path, monkeypatch, code):
    monkeypatch.setattr(pynvml, "nvmlInit", fail_with(code))
    found = inventory.read(Settings(home=tmp_path))
    assert (found.gpus, found.why, found.describe()) == ((), *["no NVIDIA driver on this node"] * 2)


def test_gpus_are_read_with_their_slices_and_peers(make_node):
    node = make_node("h200-141*3", mig=False)
    control.set_mode(node.file, True, 2)
    node.put(2, ("3g.71gb", 4), ("1g.18gb", 0))
    found = inventory.read(node.settings)
    assert [(gpu.index, gpu.mig_mode, gpu.mig_pending) for gpu in found.gpus] == [
        (0, False, False),
        (1, False, False),
        (2, True, True),
    ]
    assert {gpu.memory_bytes for gpu in found.gpus} == {143771 << 20}
    assert found.gpus[0].pci_bus_id == "00000000:07:00.0"
    assert (found.cuda_version, found.simulated, found.why) == ((13, 0), True, "")
    assert [str(one) for one in found.gpus[2].instances] == [
        "1g.18gb (GPU instance 2)",
        "3g.71gb (GPU instance 1)",
    ]
    assert all(one.is_whole and one.compute[0].uuid.startswith("MIG-") for one in found.gpus[2].instances)
    assert found.linked == {frozenset((found.gpus[0].uuid, found.gpus[1].uuid))}, "not with MIG on"


def test_a_driver_without_gpus_is_told_apart_from_no_driver(node, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    assert inventory.read(node.settings).why == "NVIDIA driver 580.159.04-simulated, but no GPU on this node"


def test_a_driver_that_fails_is_not_a_node_without_gpus(node):
    control.fail(node.file, "nvmlDeviceGetHandleByIndex_v2", pynvml.NVML_ERROR_GPU_IS_LOST, times=-1)
    with pytest.raises(StageFailed, match=r"does not answer \(GPU is lost \(NVML error 15\)\).*nvidia-smi"):
        inventory.read(node.settings)


@pytest.mark.parametrize(
    ("function", "nth"),
    [("nvmlDeviceGetHandleByIndex_v2", 2), ("nvmlDeviceGetMemoryInfo", 2), ("nvmlDeviceGetRemappedRows", 2)],
)
@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN])
def test_a_lost_gpu_is_left_out_and_named_and_the_others_keep_their_index(
    make_node, caplog, function, nth, code
):
    node = make_node("h100-80*3", mig=False)
    all_of_them = [gpu.uuid for gpu in inventory.read(node.settings).gpus]
    control.fail(node.file, function, code, nth)
    found = inventory.read(node.settings)
    assert [(gpu.index, gpu.uuid) for gpu in found.gpus] == [(0, all_of_them[0]), (2, all_of_them[2])]
    assert found.linked == {frozenset((all_of_them[0], all_of_them[2]))}
    assert list(found.lost) == [1]
    assert f"NVML error {code}" in found.lost[1]
    assert "GPU 1 does not answer" in caplog.text


def test_a_gpu_that_knows_no_mig_is_read_without(node):
    control.fail(node.file, "nvmlDeviceGetMigMode", pynvml.NVML_ERROR_NOT_SUPPORTED)
    first, second = inventory.read(node.settings).gpus
    assert (first.mig_mode, first.instances, second.mig_mode) == (None, (), True)


def test_processes_on_mig_devices_are_seen_without_the_rights_of_root(node):
    node.put(0, ("3g.40gb", 4))
    control.start_process(node.file, 0, node.gi(0, 4), pid=5)
    with node.file.changing() as state:
        state["needs_root"] = True
    assert [process.pid for process in node.gpu().instances[0].processes] == [5]


@pytest.mark.parametrize(
    ("sick", "said"),
    [
        ({"ecc_uncorrected": 1}, "uncorrected ECC errors since its last reset"),
        ({"remap_pending": True}, "rows wait to be remapped: reset it"),
        ({"remap_failed": True}, "row remapping failed: it needs repair"),
        ({"retire_pending": True}, "pages wait to be retired: reset it"),
        ({"throttle": 0x48}, "hardware slowdown"),
        ({"throttle": 0x4 | 0x1}, None),
        ({"recovery_action": 1}, "the driver asks for a reset"),
        ({"recovery_action": 2}, "the driver asks for a reboot"),
        (
            {"fabric_state": 2},
            "its NVLink fabric is not ready (in progress): is nvidia-fabricmanager running?",
        ),
    ],
)
def test_a_sick_gpu_is_told_by_its_ailments(node, sick, said):
    control.put(node.file, 1, **sick)
    well, ill = inventory.read(node.settings).gpus
    assert well.ailments == ()
    assert ill.ailments[:1] == ((said,) if said else ())


def test_what_a_product_does_not_know_is_not_held_against_it(make_node):
    node = make_node("a100-80*1")
    control.put(node.file, 0, fabric_state=1)
    for function in (
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetFieldValues",
    ):
        control.fail(node.file, function, pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert node.gpu().ailments == ()


def test_critical_xids_of_this_boot_are_found_by_bus_and_those_of_applications_are_not(node):
    with node.file.changing() as state:
        state["kernel_log"] = [
            "4,811,9,-;NVRM: Xid (PCI:0000:0f:00): 79, pid='<unknown>', GPU has fallen off the bus.",
            "4,812,9,-;NVRM: Xid (PCI:0000:07:00): 13, Graphics Exception",
            "4,813,9,-;NVRM: Xid (PCI:0000:0f:00): 79, again",
        ]
    well, ill = inventory.read(node.settings).gpus
    assert (well.ailments, ill.ailments) == ((), ("Xid 79 (fell off the bus) since boot",))
    control.reboot(node.file)
    assert inventory.read(node.settings).gpus[1].ailments == ()
    assert health.critical_xids(node.settings, []) == {}


def test_status_draws_every_gpu_in_a_line(make_node):
    node = make_node("h100-80*3", mig=False)
    control.set_mode(node.file, True, 0, 1)
    node.put(0, ("3g.40gb", 0), ("1g.10gb", 4), ("1g.10gb", 6))
    node.orphan(1, "3g.40gb", 4)
    control.start_process(node.file, 0, node.gi(0, 4))
    control.put(node.file, 1, ecc_uncorrected=1)
    table = drawing.table(inventory.read(node.settings), []).splitlines()
    assert table[0] == "SIMULATED GPUs, driver 580.159.04-simulated"
    # A star: in use; an exclamation mark: no compute instance.
    assert "|3g.40gb____________________________|1g.10gb*|.       |1g.10gb_|.       |" in table[1]
    assert "|.       |.       |.       |.       |3g.40gb!___________________________|" in table[2]
    assert table[2].endswith("uncorrected ECC errors since its last reset")
    assert "|MIG off_" in table[3]
    assert len({line.rindex("|") for line in table[1:]}) == 1, "in columns"


def test_status_names_a_lost_gpu(node):
    control.put(node.file, 1, lost=True)
    table = drawing.table(inventory.read(node.settings), []).splitlines()
    assert (len(table), table[2]) == (3, "GPU 1  does not answer: GPU is lost (NVML error 15)")


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {6, 2})
    assert inventory.available_cores() == (2, 6)
