"""Which GPUs a layout takes, and what each worker gets of them."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.errors import Busy, InputError, StageFailed
from tasks.gpu import demand, inventory, slots
from tasks.gpu.inventory import Gpu, Inventory
from tasks.gpu.provision import ask
from tasks.gpu.simulated import control
from tasks.spec import CpuLayout, MigLayout, TensorParallelLayout, parse
from tests.runs import a_spec

NO_GPU = Inventory((), None, None, "no NVIDIA driver on this node")


def of_gpus(count, linked=None, **changes):
    gpus = tuple(
        replace(Gpu(i, f"GPU-{i}", "NVIDIA H100", 80 << 30, False), **changes.get(f"gpu_{i}", {}))
        for i in range(count)
    )
    pairs = combinations(range(count), 2) if linked is None else linked
    links = frozenset(frozenset((f"GPU-{a}", f"GPU-{b}")) for a, b in pairs)
    return Inventory(gpus, "580.1", (13, 0), "", links)


def taken(layout, there, held=()):
    return [one.gpu.index for one in demand.pick(ask(layout, there, None), there, frozenset(held))]


@given(workers=st.integers(1, 64), cores=st.sets(st.integers(0, 255), min_size=1))
def test_every_core_goes_to_one_worker_and_they_are_split_evenly(workers, cores):
    layout = CpuLayout(cpu=workers)
    if workers > len(cores):
        with pytest.raises(InputError, match=rf"layout\.cpu: {workers} workers .* may use {len(cores)};"):
            slots.cpu_devices(layout, sorted(cores))
        return
    found = slots.cpu_slots(layout, slots.cpu_devices(layout, sorted(cores)))
    assert [slot["slot_id"] for slot in found] == [f"cpu-{number}" for number in range(workers)]
    # In order: neighbours stay together, also beyond core 9.
    assert [core for slot in found for core in slot["cores"]] == sorted(cores)
    sizes = {len(slot["cores"]) for slot in found}
    assert max(sizes) - min(sizes) <= 1
    assert 0 not in sizes


@pytest.mark.parametrize(
    "layout",
    [MigLayout(mig={"3g.40gb": 2}), TensorParallelLayout(tensor_parallel=1)],
    ids=["mig", "tensor_parallel"],
)
def test_a_layout_of_gpus_on_a_node_without_any_is_refused_with_what_exists(layout, monkeypatch):
    monkeypatch.setattr(inventory, "available_cores", lambda: (0, 1))
    field = next(iter(layout.model_fields_set))
    with pytest.raises(InputError, match=rf"layout\.{field}: .*no NVIDIA driver on this node.* 2 CPU core"):
        ask(layout, NO_GPU, None)


def test_groups_of_full_gpus_share_nvlink_and_are_named_by_uuid():
    there = of_gpus(4, linked=[(0, 2), (1, 3)])
    layout = TensorParallelLayout(tensor_parallel=2)
    assert slots.full_gpu_slots(layout, [gpu.uuid for gpu in there.gpus], there) == [
        {"slot_id": "gpus-0", "kind": "gpus", "uuids": ["GPU-0", "GPU-2"]},
        {"slot_id": "gpus-1", "kind": "gpus", "uuids": ["GPU-1", "GPU-3"]},
    ]


def test_of_more_gpus_those_are_taken_that_share_nvlink():
    there = of_gpus(6, linked=[(0, 4), (1, 3), (1, 5), (3, 5)])
    assert taken(TensorParallelLayout(tensor_parallel=3, gpus=3), there) == [1, 3, 5]
    assert taken(TensorParallelLayout(tensor_parallel=2, gpus=2), there, ["GPU-4"]) == [1, 3]


def test_without_nvlink_neighbours_make_a_group():
    there = of_gpus(4, linked=[])
    grouped = slots.full_gpu_slots(
        TensorParallelLayout(tensor_parallel=2), ["GPU-3", "GPU-1", "GPU-0", "GPU-2"], there
    )
    assert [slot["uuids"] for slot in grouped] == [["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"]]


def test_gpus_that_cannot_be_grouped_evenly_are_refused():
    with pytest.raises(InputError, match=r"layout\.gpus: 3 GPU\(s\) cannot be grouped by 2"):
        taken(TensorParallelLayout(tensor_parallel=2, gpus=3), of_gpus(8))


def test_a_gpu_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(InputError, match=r"layout\.gpus: there is no GPU 7 on this node; it has 0, 1"):
        taken(TensorParallelLayout(tensor_parallel=1, gpus=[0, 7]), of_gpus(2))
    with pytest.raises(InputError, match=r"layout\.gpus: 3 GPUs are asked for, and this node has 2"):
        taken(TensorParallelLayout(tensor_parallel=1, gpus=3), of_gpus(2))


def test_a_number_of_gpus_leaves_out_those_that_others_hold_or_use():
    layout = TensorParallelLayout(tensor_parallel=1, gpus=2)
    assert taken(layout, of_gpus(4), ["GPU-0", "GPU-2"]) == [1, 3]
    with pytest.raises(Busy, match=r"2 GPUs are asked for .* 1 of 4 are not leased"):
        taken(layout, of_gpus(4), ["GPU-0", "GPU-1", "GPU-2"])
    used = {"processes": (inventory.GpuProcess(9, "training"),)}
    assert taken(layout, of_gpus(4, gpu_1=used)) == [0, 2]
    with pytest.raises(Busy, match=r"GPU 1 is in use by pid 9 \(training\)"):
        taken(TensorParallelLayout(tensor_parallel=1), of_gpus(4, gpu_1=used))


def test_a_sick_gpu_is_left_out_and_named():
    there = of_gpus(4, gpu_2={"ailments": ("Xid 79",)})
    everything = TensorParallelLayout(tensor_parallel=1)
    assert taken(everything, there) == [0, 1, 3]
    assert ask(everything, there, None).notes == ("GPU 2 is left out: Xid 79",)
    with pytest.raises(StageFailed, match=r"layout\.gpus names a GPU .*GPU 2 is left out: Xid 79"):
        taken(TensorParallelLayout(tensor_parallel=1, gpus=[1, 2]), there)
    with pytest.raises(StageFailed, match=r"4 GPUs are asked for, and 3 are healthy\. GPU 2"):
        taken(TensorParallelLayout(tensor_parallel=1, gpus=4), there)


def test_a_lost_gpu_is_left_out_and_named():
    whole = of_gpus(4)
    there = replace(whole, gpus=(*whole.gpus[:2], whole.gpus[3]), lost={2: "GPU is lost"})
    everything = TensorParallelLayout(tensor_parallel=1)
    assert taken(everything, there) == [0, 1, 3]
    assert ask(everything, there, None).notes == ("GPU 2 is left out: it does not answer (GPU is lost)",)
    assert ask(TensorParallelLayout(tensor_parallel=1, gpus=[1, 3]), there, None).notes == ()
    with pytest.raises(
        StageFailed, match=r"layout\.gpus names a GPU .*GPU 2 is left out: it does not answer"
    ):
        taken(TensorParallelLayout(tensor_parallel=1, gpus=[1, 2]), there)
    with pytest.raises(StageFailed, match=r"4 GPUs are asked for, and 3 are healthy\. GPU 2"):
        taken(TensorParallelLayout(tensor_parallel=1, gpus=4), there)
    with pytest.raises(InputError, match=r"5 GPUs are asked for, and this node has 4"):
        taken(TensorParallelLayout(tensor_parallel=1, gpus=5), there)


def test_the_gpus_are_taken_that_need_the_fewest_changes(make_node):
    node = make_node("h100-80*4", mig=False)
    control.set_mode(node.file, True, 1, 2, 3)
    node.put(1, ("1g.10gb", 0), ("1g.10gb", 4))
    node.put(3, ("3g.40gb", 4))
    there = inventory.read(node.settings)
    for gpus, indices in ((1, [3]), (2, [2, 3]), (3, [0, 2, 3])):
        layout = MigLayout(mig={"3g.40gb": 1}, gpus=gpus, replace_foreign=True)
        assert taken(layout, there) == indices


def test_full_gpus_that_are_cut_are_refused_and_empty_ones_are_switched(make_node):
    node = make_node("h100-80*2", mig=True)
    node.put(1, ("1g.10gb", 0))
    there = inventory.read(node.settings)
    with pytest.raises(StageFailed, match=r"full GPUs need MIG off, and GPU 1 is cut into 1g\.10gb"):
        taken(TensorParallelLayout(tensor_parallel=1), there)
    (one,) = demand.pick(ask(TensorParallelLayout(tensor_parallel=1, gpus=1), there, None), there)
    assert [str(step) for step in one.difference.steps()] == ["mode MIG mode off"]


@pytest.mark.parametrize("flag", ["tensor-parallel-size", "pipeline_parallel_size"])
def test_several_devices_for_one_worker_are_refused_on_mig_with_the_reason(flag):
    spec = a_spec(layout={"mig": {"3g.40gb": 2}}, serving={"extra_args": {flag: 2}})
    with pytest.raises(InputError, match=rf"serving\.extra_args\.{flag}: .*does not support NCCL"):
        slots.refuse_parallel_workers(spec)
    slots.refuse_parallel_workers(a_spec(layout={"tensor_parallel": 1}, serving={"extra_args": {flag: 2}}))
    with pytest.raises(InputError, match=r"layout.*NCCL.*remove layout\.tensor_parallel"):
        a_spec(layout={"mig": {"3g.40gb": 2}, "tensor_parallel": 2})


def test_on_a_simulated_node_workers_get_cores_and_share_them_when_there_are_too_few():
    found = [{"slot_id": f"mig-{number}", "kind": "mig", "uuid": f"MIG-{number}"} for number in range(3)]
    cores = [slot["cores"] for slot in slots.on_cpu(found, [0, 1, 2, 3])]
    assert cores == [[0, 1], [2], [3]]
    shared = slots.on_cpu(found, [0, 1])
    assert [slot["cores"] for slot in shared] == [[0], [1], [0]]
    assert shared[2]["stands_for"] == found[2]
    assert {slot["kind"] for slot in shared} == {"cpu"}


def test_a_layout_is_one_of_its_kinds():
    assert (
        parse(a_spec(layout={"mig_parted": "/x", "config": "c"}).model_dump(mode="json")).layout.config == "c"
    )
