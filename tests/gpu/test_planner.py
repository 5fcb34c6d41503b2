"""From counts to places: what stays, what goes, and why not."""

import pytest

from tasks.errors import Busy
from tasks.gpu import planner
from tasks.gpu.layouts import difference
from tasks.gpu.planner import DoesNotFit, UnknownProfile
from tasks.gpu.simulated import control


def places(choice):
    return [f"{spot.name}@{spot.placement.start}" for spot in choice.layout.spots]


def test_large_instances_are_placed_and_created_before_small_ones(node):
    """harvester #11636: a 3g after 1g and 2g has no place."""
    gpu = node.gpu()
    choice = planner.choose(gpu, {"1g.10gb": 3, "3g.40gb": 1})
    steps = [str(step) for step in difference(gpu, choice.layout, ()).steps()]
    assert steps[0] == "create 3g.40gb at 0-3"
    assert node.cut({"1g.10gb": 3, "3g.40gb": 1}).error == ""


def test_an_instance_that_fits_is_kept_with_its_uuid(node):
    """mig-parted #119: adding a profile destroys the others there."""
    node.put(0, ("1g.10gb", 0), ("1g.10gb", 1), ("1g.10gb", 2))
    before = node.uuids()["1g.10gb"]
    assert node.cut({"1g.10gb": 3, "2g.20gb": 1}).error == ""
    assert node.uuids()["1g.10gb"] == before
    assert node.layout() == ["1g.10gb@0", "1g.10gb@1", "1g.10gb@2", "2g.20gb@4"]


def test_after_a_change_nothing_is_left_to_do(node):
    counts = {"2g.20gb": 2, "1g.10gb": 1}
    node.cut(counts)
    gpu = node.gpu()
    choice = planner.choose(gpu, counts)
    assert difference(gpu, choice.layout, choice.destroy).is_empty


def test_what_is_not_in_the_way_stays_also_when_it_is_not_wanted(node):
    node.put(0, ("2g.20gb", 4))
    choice = planner.choose(node.gpu(), {"3g.40gb": 1}, replace_foreign=True)
    assert (places(choice), choice.destroy) == (["3g.40gb@0"], ())


def test_of_what_is_in_the_way_the_least_is_destroyed(node):
    node.put(0, ("1g.10gb", 0), ("1g.10gb", 1), ("1g.10gb", 5))
    choice = planner.choose(node.gpu(), {"3g.40gb": 1}, replace_foreign=True)
    assert places(choice) == ["3g.40gb@4"]
    assert [one.placement.start for one in choice.destroy] == [5]


def test_slices_that_are_free_in_the_wrong_places_are_named_with_what_takes_them(node):
    """dra-driver-nvidia-gpu #933."""
    node.put(0, ("1g.10gb", 1), ("2g.20gb", 4))
    with pytest.raises(DoesNotFit) as refused:
        planner.choose(node.gpu(), {"3g.40gb": 1})
    message = str(refused.value)
    assert "3g.40gb needs slices 0-3 or 4-7" in message
    assert "slices 1 by 1g.10gb (GPU instance 1)" in message
    assert "slices 4-5 by 2g.20gb (GPU instance 2)" in message
    assert "replace_foreign: true" in message


def test_what_is_in_use_is_not_destroyed_and_its_processes_are_named(node):
    node.put(0, ("1g.10gb", 1), ("2g.20gb", 4))
    for start in (1, 4):
        control.start_process(node.file, 0, node.gi(0, start), pid=7000 + start)
    with pytest.raises(Busy, match=r"slices 1 by 1g.10gb .*pid 7001 \(/usr/bin/training\).*pid 7004") as busy:
        planner.choose(node.gpu(), {"3g.40gb": 1}, replace_foreign=True)
    assert busy.value.exit_status == 3
    control.end_processes(node.file)
    control.start_process(node.file, 0, node.gi(0, 1))
    choice = planner.choose(node.gpu(), {"3g.40gb": 1}, replace_foreign=True)
    assert [one.placement.start for one in choice.destroy] == [4], "around the one in use"


def test_a_device_in_use_is_not_handed_on_although_it_is_of_the_right_kind(node):
    node.put(0, ("1g.10gb", 2))
    control.start_process(node.file, 0, node.gi(0, 2))
    assert places(planner.choose(node.gpu(), {"1g.10gb": 1})) == ["1g.10gb@0"]


def test_a_gpu_in_use_is_not_cut(make_node):
    node = make_node("h100-80*1", mig=False)
    control.start_process(node.file, 0, pid=99)
    with pytest.raises(Busy, match=r"GPU 0 cannot be cut while pid 99 .* use"):
        planner.choose(node.gpu(), {"1g.10gb": 1})


def test_what_cannot_fit_at_all_is_the_users_to_change(node):
    with pytest.raises(
        DoesNotFit, match=r"3 x 3g\.40gb do not fit together on GPU 0 .*not even when it is empty"
    ):
        planner.choose(node.gpu(), {"3g.40gb": 3})
    with pytest.raises(DoesNotFit, match=r"2 x 1g\.10gb\+me"):
        planner.choose(node.gpu(), {"1g.10gb+me": 2})


def test_an_unknown_name_gets_the_list_of_those_that_exist(node):
    """gpu-operator #351, mig-parted #31: names are the driver's, not computed ones."""
    with pytest.raises(
        UnknownProfile, match=r"GPU 0 .* has no profile 35g\.35gb; its driver offers 1g\.10gb, 2g"
    ):
        planner.choose(node.gpu(), {"35g.35gb": 1})
    assert places(planner.choose(node.gpu(), {"MIG 3g.40gb": 1})) == ["3g.40gb@0"]


def test_names_and_ids_are_resolved_on_each_device(node):
    """mig-parted #157: the same name has another id on another GPU."""
    control.put(node.file, 1, profile_overrides={"19": {"profile_id": 14, "enum": 5}, "14": {"absent": True}})
    ids = [planner.choose(node.gpu(index), {"1g.10gb": 1}).layout.spots[0].profile_id for index in range(2)]
    assert ids == [19, 14]
    assert node.cut({"1g.10gb": 2}, index=1).error == ""


def test_the_planner_knows_no_table_it_follows_what_the_driver_says(make_node):
    node = make_node("h100-80*1")
    odd = {
        "19": {"name": "MIG 1g.9gb", "starts": [1, 3, 5], "most": 3},
        "9": {"name": "MIG 3g.39gb", "starts": [2], "size": 3},
        "0": {"absent": True},
        "5": {"slices": 5, "starts": [0], "size": 6},
    }
    control.put(node.file, 0, profile_overrides=odd)
    assert places(planner.choose(node.gpu(), {"1g.9gb": 2, "3g.39gb": 1})) == [
        "1g.9gb@1",
        "3g.39gb@2",
        "1g.9gb@5",
    ]
    assert node.cut({"1g.9gb": 2, "3g.39gb": 1}).error == ""
    with pytest.raises(DoesNotFit, match=r"3 x 1g\.9gb"):
        planner.choose(node.gpu(), {"1g.9gb": 3, "3g.39gb": 1})
    with pytest.raises(UnknownProfile, match=r"offers 1g\.9gb, 2g\.20gb, 3g\.39gb, 4g\.40gb"):
        planner.choose(node.gpu(), {"7g.80gb": 1})


def test_an_orphan_that_is_not_ours_is_named_and_not_used(node):
    node.orphan(0, "3g.40gb", 0)
    assert places(planner.choose(node.gpu(), {"3g.40gb": 1})) == ["3g.40gb@4"]
    with pytest.raises(
        DoesNotFit, match=r"slices 0-3 by 3g.40gb \(GPU instance 90\), which has no compute instance"
    ):
        planner.choose(node.gpu(), {"3g.40gb": 2})
    choice = planner.choose(node.gpu(), {"3g.40gb": 2}, replace_foreign=True)
    assert [one.is_orphan for one in choice.destroy] == [True]
