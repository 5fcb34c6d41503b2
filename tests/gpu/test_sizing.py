"""How much memory a worker needs, and which profile an `auto` layout takes for it."""

import json

import pytest

from tasks.errors import InputError
from tasks.gpu import demand, inventory, sizing
from tasks.gpu.provision import ask
from tasks.gpu.sizing import ModelShape
from tasks.spec import MigLayout, Serving
from tests.gpu.node import a_node

GIB = 1 << 30
QWEN_9B = {
    "text_config": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
}
"""Of the size of Qwen3.5-9B."""
SERVING = {"max_model_len": 4096, "max_num_seqs": 16, "max_num_batched_tokens": 4096}


def needs(weights_gib, **serving):
    return sizing.estimate(ModelShape.of(QWEN_9B), int(weights_gib * GIB), Serving(**{**SERVING, **serving}))


def test_only_layers_with_full_attention_hold_a_kv_cache():
    shape = ModelShape.of(QWEN_9B)
    assert (shape.full_attention_layers, shape.linear_layers) == (8, 24)
    assert sizing.kv_cache_bytes_per_token(shape, "auto") == 2 * 8 * 4 * 256 * 2
    assert sizing.kv_cache_bytes_per_token(shape, "fp8") * 2 == sizing.kv_cache_bytes_per_token(shape, "auto")
    # 32 heads of 128 x 128 in 32 bits, and three inputs of a convolution over 8192 channels in 16.
    assert sizing.recurrent_state_bytes(shape) == 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)


def test_a_model_without_linear_layers_holds_a_cache_in_all_of_them():
    plain = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    shape = ModelShape.of({**plain, "vocab_size": 49152})
    assert (shape.full_attention_layers, shape.head_dim, sizing.recurrent_state_bytes(shape)) == (30, 64, 0)
    every_fourth = ModelShape.of({**plain, "vocab_size": 1, "full_attention_interval": 6})
    assert every_fourth.full_attention_layers == 5


def test_the_numbers_are_shown_and_add_up():
    found = needs(6)
    parts = found.weights + found.kv_cache + found.recurrent_state + found.overhead
    assert found.total == parts
    assert found.least == parts - found.kv_cache + found.kv_cache_least
    assert found.kv_cache == 16 * found.kv_cache_least == 16 * 4096 * 32768
    assert "weights 6.0 + KV cache 2.0 + recurrent state 0.8" in found.describe()
    assert found.document()["total_gib"] == round(found.total / GIB, 2)


def test_a_cache_of_a_given_size_is_taken_as_given():
    assert needs(6, kv_cache_memory_mb=512).kv_cache == 512 << 20


@pytest.mark.parametrize(
    ("weights_gib", "serving", "profile"),
    [
        (1, {}, "1g.10gb"),
        (6, {}, "2g.20gb"),
        (18, {}, "3g.40gb"),
        (18, {"max_num_seqs": 256, "max_model_len": 8192}, "7g.80gb"),
        (40, {}, "7g.80gb"),
    ],
)
def test_auto_takes_the_smallest_profile_that_holds_a_worker(node, weights_gib, serving, profile):
    """Of profiles with equal memory the one that leaves less of the GPU idle."""
    assert sizing.smallest(node.gpu().cut.profiles, needs(weights_gib, **serving)).name == profile


def test_auto_follows_the_device_not_a_table(tmp_path):
    small = a_node(tmp_path, "a100-40*1", mig=True)
    large = a_node(tmp_path, "h200-141*1", mig=True)
    assert sizing.smallest(small.gpu().cut.profiles, needs(6)).name == "3g.20gb"
    assert sizing.smallest(large.gpu().cut.profiles, needs(6)).name == "1g.18gb"


def test_auto_cuts_as_many_as_go_and_says_why(node):
    there = inventory.read(node.settings)
    asked = ask(MigLayout(mig="auto"), there, needs(6))
    assert asked.counts[there.gpus[0].uuid] == {"2g.20gb": 3}
    assert asked.notes == (f"auto: 3 x 2g.20gb (19.6 GiB each), because {needs(6).describe()}",)
    assert [str(step) for step in demand.pick(asked, there)[0].difference.steps()] == [
        f"create 2g.20gb at {place}" for place in ("0-1", "2-3", "4-5")
    ]


def test_auto_before_there_is_a_release_says_what_to_do_first(node):
    with pytest.raises(InputError, match=r"layout\.mig: `auto` is chosen from the release.*download"):
        ask(MigLayout(mig="auto"), inventory.read(node.settings), None)


def test_what_no_device_holds_is_refused_with_the_numbers(node):
    with pytest.raises(
        InputError, match=r"no profile of this GPU holds a worker: weights 90\.0.*7g\.80gb, has 79\.2"
    ):
        sizing.smallest(node.gpu().cut.profiles, needs(90))


def test_a_config_without_sizes_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1}))
    with pytest.raises(InputError, match=r"model\.repo: config\.json does not say.*num_attention_heads"):
        sizing.of_folder(tmp_path, 1, Serving())
    with pytest.raises(InputError, match=r"model\.repo: there is no readable config\.json"):
        sizing.of_folder(tmp_path / "none", 1, Serving())
