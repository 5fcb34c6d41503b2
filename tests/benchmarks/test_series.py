import pytest

from benchmarks.gpu import series
from benchmarks.gpu.series import Sample


def _line(until_s: int, finished_per_s: float, tokens_per_s: float, running: float) -> list[Sample]:
    empty = dict.fromkeys([*series.GAUGES, *series.COUNTERS], 0.0)
    return [
        Sample(
            100.0 + at,
            {
                **empty,
                "finished": finished_per_s * at,
                "generated_tokens": tokens_per_s * at,
                "running": running,
            },
        )
        for at in range(until_s + 1)
    ]


def test_the_steady_part_leaves_a_slow_start_and_a_slow_end_out() -> None:
    full = _line(10, 10, 1000, 8.0)
    slow = [Sample(full[0].at_s - 50.0, full[0].values)]
    end = [Sample(full[-1].at_s + 50.0, {**full[-1].values, "running": 0.0})]
    steady = series.steady([*slow, *full, *end], rows=100, max_num_seqs=8)
    assert steady["generated_tokens_per_s"] == pytest.approx(1000)
    assert steady["rows_per_s"] == pytest.approx(10)
    assert steady["seconds"] == pytest.approx(8)
    assert steady["mean_running_share"] == pytest.approx(1.0)


def test_mean_running_weighs_samples_by_the_time_between_them() -> None:
    samples = _line(10, 10, 1000, 8.0)
    dip = Sample(samples[5].at_s + 0.01, {**samples[5].values, "running": 0.0})
    steady = series.steady([*samples[:6], dip, *samples[6:]], rows=100, max_num_seqs=8)
    # One second of the eight is a ramp from 0 to 8; the dip itself lasts no time.
    assert steady["mean_running"] == pytest.approx(8.0 - 4.0 / 8, abs=0.02)


def test_counters_of_prometheus_text_are_summed_over_labels() -> None:
    sample = series.parse(
        "# HELP vllm:request_success_total x\n"
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 3.0\n'
        'vllm:request_success_total{finished_reason="length",model_name="m"} 4.0\n'
        'vllm:num_requests_running{engine="0"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\n'
        'vllm:time_to_first_token_seconds_bucket{le="0.1",engine="0"} 1.0\n'
        'vllm:time_to_first_token_seconds_bucket{le="+Inf",engine="0"} 2.0\n'
        'vllm:time_to_first_token_seconds_sum{engine="0"} 0.3\n',
        1.0,
    )
    assert sample.values["finished"] == 7
    assert sample.values["running"] == 2
    assert sample.values["waiting"] == 0
    assert sample.histograms["ttft_s"] == {0.1: 1.0, float("inf"): 2.0}
    assert sample.sums["ttft_s"] == 0.3


@pytest.mark.parametrize(
    ("share", "value"),
    [(0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)],
)
def test_a_quantile_lies_on_a_straight_line_inside_its_bucket(share: float, value: float) -> None:
    assert series.quantile({1.0: 50.0, 2.0: 100.0, float("inf"): 100.0}, share) == pytest.approx(value)


def test_a_quantile_in_the_open_bucket_is_its_lower_bound() -> None:
    assert series.quantile({1.0: 1.0, float("inf"): 100.0}, 0.99) == 1.0
    assert series.quantile({1.0: 0.0, float("inf"): 0.0}, 0.5) is None
