import pytest

from benchmarks.gpu import loads


def test_a_load_is_prompt_answer_rows_and_what_is_shared() -> None:
    load = loads.parse("2048x128x3+1500")
    assert (load.name, load.lengths, load.shared) == ("2048-128-shared", ((2048, 128),) * 3, 1500)
    assert load.is_even
    assert loads.parse("256x512x4").describe() == {
        "rows": 4,
        "prompt_tokens": 256.0,
        "answer_tokens": 512.0,
        "shared_prefix_tokens": 0,
    }


def test_the_mix_is_always_the_same_and_as_skewed_as_it_says() -> None:
    load = loads.parse("mixx1000")
    assert load == loads.parse("mixx1000")
    assert load.rows == 1000
    assert not load.is_even
    assert {length: load.lengths.count(length) / 10 for length in loads.MIX} == pytest.approx(loads.MIX)
    longest = [answer for _, answer in load.lengths if answer == 1024]
    assert sum(longest) / sum(answer for _, answer in load.lengths) == pytest.approx(0.4, abs=0.02)


def test_what_is_no_load_is_said() -> None:
    with pytest.raises(SystemExit, match="256x512"):
        loads.parse("256x512")
