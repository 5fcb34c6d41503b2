import pytest

from benchmarks.gpu.bounds import Shape, bounds, decode_step

NINE_B = Shape(4096, 12_288, 248_320, 32, 8, 16, 4, 256, 16, 32, 128)


def test_the_shape_of_the_9b_adds_up_to_its_parameters() -> None:
    embedding = NINE_B.head_parameters
    assert NINE_B.layer_parameters + NINE_B.head_parameters + embedding == pytest.approx(8.95e9, rel=0.01)


def test_weights_are_read_once_a_step_and_states_once_a_sequence() -> None:
    one, many = decode_step(NINE_B, 1, 100), decode_step(NINE_B, 256, 100)
    assert one["weight_bytes"] == many["weight_bytes"]
    assert many["state_bytes"] == 256 * one["state_bytes"]
    # 24 layers x 32 heads x 128 x 128 x 4 bytes, read and written.
    assert one["state_bytes"] == 2 * 24 * 32 * 128 * 128 * 4


def test_a_long_prompt_is_bound_by_computing_and_not_by_memory() -> None:
    found = bounds(
        NINE_B,
        sequences=256,
        prompt_tokens=2048,
        answer_tokens=128,
        bytes_per_s=4.3e12,
        operations_per_s=780e12,
    )
    assert found["compute"] < found["memory"]
    assert found["in_turn"] <= found["compute"]


def test_faster_layers_leave_the_head_and_the_states_as_they_were() -> None:
    given = {"sequences": 256, "prompt_tokens": 256, "answer_tokens": 512, "bytes_per_s": 4e12}
    slow = bounds(NINE_B, operations_per_s=700e12, **given)
    fast = bounds(NINE_B, operations_per_s=700e12, layer_operations_per_s=1400e12, layer_bytes=1.0, **given)
    assert fast["step_state_gb"] == slow["step_state_gb"]
    assert slow["in_turn"] < fast["in_turn"] < 2 * slow["in_turn"]
