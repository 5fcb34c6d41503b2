"""`make demo SIM=...` asks for MIG on GPUs that say that they are simulated."""

import pytest

from demo import simulated
from demo.world import World
from tasks.errors import InputError
from tasks.gpu import inventory
from tasks.spec import parse


def test_a_simulated_node_is_handed_over_with_mig_on_and_says_what_it_is(tmp_path):
    world = World(tmp_path, sim="dgx-a100")
    world.pipeline.mkdir()
    assert simulated.make_ready(world).startswith(
        "SIMULATED GPUs: 8 GPU(s): NVIDIA A100-SXM4-80GB (simulated)"
    )
    there = inventory.read(world.settings())
    assert all(gpu.mig_mode and not gpu.instances for gpu in there.gpus)
    again = inventory.read(world.settings())
    simulated.make_ready(world)
    assert again == there, "what it holds is left as it is"


def test_airflows_tasks_get_the_same_node_as_the_demo(tmp_path):
    world = World(tmp_path, sim="dgx-a100")
    variables = world.environment()
    assert variables["QWEN_PIPELINE_NVML"] == world.settings().nvml == "sim:a100-80*8"
    assert variables["QWEN_PIPELINE_NVML_STATE"] == str(world.settings().nvml_state)
    assert "QWEN_PIPELINE_NVML" not in World(tmp_path).environment()


def test_its_run_is_cut_into_few_devices_and_has_answers_of_its_own(tmp_path):
    world = World(tmp_path, sim="dgx-a100")
    assert parse(world.spec()).layout.mig == {"3g.40gb": 2}
    assert world.answers != World(tmp_path).answers


def test_an_unknown_node_is_refused_with_those_that_exist(tmp_path):
    with pytest.raises(InputError, match="SIM=dgx-x is not known; one of dgx-a100"):
        World(tmp_path, sim="dgx-x")
