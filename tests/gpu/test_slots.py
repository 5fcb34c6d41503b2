"""From a layout to what each worker gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.errors import Busy, InputError, StageFailed
from tasks.gpu.inventory import Gpu, Inventory
from tasks.gpu.slots import devices_for, slots_of
from tasks.spec import CpuLayout, MigLayout, TensorParallelLayout

NO_GPU = Inventory((), None, None, "no NVIDIA driver on this node")


def node(gpus, mig=()):
    return Inventory(
        tuple(Gpu(i, f"GPU-{i}", "NVIDIA H100", 80 << 30, i in mig) for i in range(gpus)),
        "580.1",
        (13, 0),
        "",
    )


@given(workers=st.integers(1, 64), cores=st.sets(st.integers(0, 255), min_size=1))
def test_every_core_goes_to_one_worker_and_they_are_split_evenly(workers, cores):
    layout = CpuLayout(cpu=workers)
    if workers > len(cores):
        with pytest.raises(InputError, match=rf"layout\.cpu: {workers} workers .* may use {len(cores)};"):
            devices_for(layout, NO_GPU, sorted(cores))
        return
    slots = slots_of(layout, devices_for(layout, NO_GPU, sorted(cores)))
    assert [slot["slot_id"] for slot in slots] == [f"cpu-{number}" for number in range(workers)]
    # In order: neighbours stay together, also beyond core 9.
    assert [core for slot in slots for core in slot["cores"]] == sorted(cores)
    sizes = {len(slot["cores"]) for slot in slots}
    assert max(sizes) - min(sizes) <= 1
    assert 0 not in sizes


@pytest.mark.parametrize(
    "layout",
    [MigLayout(mig={"3g.40gb": 2}), TensorParallelLayout(tensor_parallel=1)],
    ids=["mig", "tensor_parallel"],
)
def test_a_layout_of_gpus_on_a_node_without_any_is_refused_with_what_exists(layout):
    field = next(iter(layout.model_fields_set))
    with pytest.raises(InputError, match=rf"layout\.{field}: .*no NVIDIA driver on this node.* 2 CPU core"):
        devices_for(layout, NO_GPU, [0, 1])


def test_mig_is_refused_as_not_there_yet_and_nothing_is_pretended():
    with pytest.raises(StageFailed, match=r"layout\.mig: .*not in this version yet"):
        devices_for(MigLayout(mig={"3g.40gb": 2}), node(8), [0])


def test_full_gpus_are_grouped_and_named_by_uuid():
    layout = TensorParallelLayout(tensor_parallel=2, gpus=[5, 1, 0, 4])
    devices = devices_for(layout, node(8), [0])
    assert devices == ("GPU-0", "GPU-1", "GPU-4", "GPU-5")
    assert slots_of(layout, devices) == [
        {"slot_id": "gpus-0", "kind": "gpus", "uuids": ["GPU-0", "GPU-1"]},
        {"slot_id": "gpus-1", "kind": "gpus", "uuids": ["GPU-4", "GPU-5"]},
    ]


def test_gpus_that_cannot_be_grouped_evenly_are_refused():
    with pytest.raises(InputError, match=r"layout\.gpus: 3 GPU\(s\) cannot be grouped by 2"):
        devices_for(TensorParallelLayout(tensor_parallel=2, gpus=3), node(8), [0])


def test_a_gpu_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(InputError, match=r"layout\.gpus: there is no GPU 7 on this node; it has 0, 1"):
        devices_for(TensorParallelLayout(tensor_parallel=1, gpus=[0, 7]), node(2), [0])
    with pytest.raises(InputError, match=r"layout\.gpus: 3 GPUs are asked for, and this node has 2"):
        devices_for(TensorParallelLayout(tensor_parallel=1, gpus=3), node(2), [0])


def test_a_number_of_gpus_leaves_out_those_that_others_hold():
    layout = TensorParallelLayout(tensor_parallel=1, gpus=2)
    assert devices_for(layout, node(4), [0], frozenset({"GPU-0", "GPU-2"})) == ("GPU-1", "GPU-3")
    with pytest.raises(Busy, match=r"2 GPUs are asked for .* 1 of 4 are not leased"):
        devices_for(layout, node(4), [0], frozenset({"GPU-0", "GPU-1", "GPU-2"}))


def test_full_gpus_with_mig_on_are_refused():
    layout = TensorParallelLayout(tensor_parallel=1, gpus="all")
    with pytest.raises(StageFailed, match=r"MIG off, and it is on for GPU 1, 3;.*nvidia-smi"):
        devices_for(layout, node(4, mig={1, 3}), [0])
