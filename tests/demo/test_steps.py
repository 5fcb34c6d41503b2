import json

from demo.steps import how_good


def test_a_model_that_was_trained_here_says_how_good_it_is(tmp_path):
    metrics = {"held_out_perplexity": 115.06, "uniform_perplexity": 4096}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    assert how_good(tmp_path) == ", perplexity 115 on held-out text (4,096 if it knew nothing)"


def test_of_another_model_nothing_is_said(tmp_path):
    assert how_good(tmp_path) == ""
