"""The engine's own counters over time, and what they say of the steady part of a run.

Between 10% and 90% of the rows finished, neither the start (an empty engine fills up) nor the end (the last
rows leave it half empty) counts. Both a server's /metrics and vLLM's in-process reader give the same names.
"""

import threading
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
}
COUNTERS = {
    "finished": "vllm:request_success",
    "prompt_tokens": "vllm:prompt_tokens",
    "cached_tokens": "vllm:prompt_tokens_cached",
    "generated_tokens": "vllm:generation_tokens",
    "preemptions": "vllm:num_preemptions",
}
HISTOGRAMS = {
    "ttft_s": "vllm:time_to_first_token_seconds",
    "time_per_token_s": "vllm:request_time_per_output_token_seconds",
    "inter_token_s": "vllm:inter_token_latency_seconds",
    "queued_s": "vllm:request_queue_time_seconds",
    "prefill_s": "vllm:request_prefill_time_seconds",
    "latency_s": "vllm:e2e_request_latency_seconds",
}

Buckets = Mapping[float, float]
"""Upper bound to how many observations were at most that."""


@dataclass(frozen=True)
class Sample:
    """All of it at one moment."""

    at_s: float
    values: Mapping[str, float]
    """By the keys of GAUGES and COUNTERS."""
    histograms: Mapping[str, Buckets] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)


def parse(text: str, at_s: float) -> Sample:
    """From Prometheus' text format; summed over all labels but a bucket's bound."""
    values = dict.fromkeys([*GAUGES, *COUNTERS], 0.0)
    histograms: dict[str, dict[float, float]] = {key: {} for key in HISTOGRAMS}
    sums = dict.fromkeys(HISTOGRAMS, 0.0)
    plain = {name: key for key, name in GAUGES.items()}
    plain |= {f"{name}_total": key for key, name in COUNTERS.items()}
    buckets = {f"{name}_bucket": key for key, name in HISTOGRAMS.items()}
    totals = {f"{name}_sum": key for key, name in HISTOGRAMS.items()}
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        head, _, number = line.rpartition(" ")
        name, _, labels = head.partition("{")
        if name in plain:
            values[plain[name]] += float(number)
        elif name in totals:
            sums[totals[name]] += float(number)
        elif name in buckets:
            bound = float(labels.partition('le="')[2].partition('"')[0])
            found = histograms[buckets[name]]
            found[bound] = found.get(bound, 0.0) + float(number)
    return Sample(at_s, values, histograms, sums)


def scrape(url: str, at_s: float) -> Sample:
    """Of the server at `url`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answered:
        return parse(answered.read().decode(), at_s)


def from_reader(metrics: Sequence[Any], at_s: float) -> Sample:
    """From `vllm.LLM.get_metrics()`."""
    values = dict.fromkeys([*GAUGES, *COUNTERS], 0.0)
    histograms: dict[str, dict[float, float]] = {key: {} for key in HISTOGRAMS}
    sums = dict.fromkeys(HISTOGRAMS, 0.0)
    plain = {name: key for key, name in (GAUGES | COUNTERS).items()}
    distributions = {name: key for key, name in HISTOGRAMS.items()}
    for metric in metrics:
        if metric.name in plain and hasattr(metric, "value"):
            values[plain[metric.name]] += metric.value
        elif metric.name in distributions:
            key = distributions[metric.name]
            sums[key] += metric.sum
            for bound, count in metric.buckets.items():
                histograms[key][float(bound)] = histograms[key].get(float(bound), 0.0) + count
    return Sample(at_s, values, histograms, sums)


class Sampler:
    """Asks in a thread, for the length of a block, every `every_s` seconds and once at each end."""

    def __init__(self, ask: Callable[[float], Sample], every_s: float = 0.25) -> None:
        self.samples: list[Sample] = []
        self._ask = ask
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Sampler":
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._sample()

    def _work(self) -> None:
        while not self._over.wait(self._every_s):
            self._sample()

    def _sample(self) -> None:
        try:
            self.samples.append(self._ask(time.monotonic()))
        except Exception as error:  # a sample more or less; but a run without any says why
            print(f"no sample: {error}")


def summary(samples: Sequence[Sample], rows: int, max_num_seqs: int) -> dict[str, Any]:
    """What a run of `rows` rows did: as a whole, in its steady part, and each request's times.

    The quantiles are read off the engine's histograms, straight lines between the bounds of a bucket.
    """
    first, last = samples[0], samples[-1]
    total_s = last.at_s - first.at_s
    return {
        "samples": len(samples),
        "whole": {
            "seconds": round(total_s, 2),
            "rows_per_s": round(rows / total_s, 2),
            "generated_tokens": _grown(samples, "generated_tokens"),
            "prompt_tokens": _grown(samples, "prompt_tokens"),
            "cached_prompt_tokens": _grown(samples, "cached_tokens"),
            "generated_tokens_per_s": round(_grown(samples, "generated_tokens") / total_s, 1),
            "preemptions": _grown(samples, "preemptions"),
            "most_kv_cache_usage": round(max(one.values["kv_cache_usage"] for one in samples), 4),
        },
        "steady": steady(samples, rows, max_num_seqs),
        "requests": {key: _distribution(first, last, key) for key in HISTOGRAMS if key in last.histograms},
    }


def steady(
    samples: Sequence[Sample], rows: int, max_num_seqs: int, begin: float = 0.1, end: float = 0.9
) -> dict[str, float]:
    """Rates and mean occupancy between `begin` and `end` of the rows finished."""
    began_s, ended_s = (_when(samples, "finished", share * rows) for share in (begin, end))
    seconds = ended_s - began_s
    if seconds <= 0:
        return {}
    grown = {
        key: _at(samples, key, ended_s) - _at(samples, key, began_s)
        for key in ("finished", "generated_tokens", "prompt_tokens")
    }
    running = _mean(samples, "running", began_s, ended_s)
    return {
        "seconds": round(seconds, 2),
        "rows_per_s": round(grown["finished"] / seconds, 2),
        "generated_tokens_per_s": round(grown["generated_tokens"] / seconds, 1),
        "prompt_tokens_per_s": round(grown["prompt_tokens"] / seconds, 1),
        "mean_running": round(running, 1),
        "mean_running_share": round(running / max_num_seqs, 4),
        "mean_waiting": round(_mean(samples, "waiting", began_s, ended_s), 1),
    }


def quantile(buckets: Buckets, share: float) -> float | None:
    """The value below which `share` of the observations lie; None without any.

    In the last, open bucket it is that bucket's lower bound.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    wanted = share * buckets[bounds[-1]]
    counts = [buckets[bound] for bound in bounds]
    place = bisect_left(counts, wanted)
    below_bound, below = (bounds[place - 1], counts[place - 1]) if place else (0.0, 0.0)
    if bounds[place] == float("inf"):
        return below_bound
    inside = (wanted - below) / (counts[place] - below) if counts[place] > below else 1.0
    return below_bound + inside * (bounds[place] - below_bound)


def _distribution(first: Sample, last: Sample, key: str) -> dict[str, float | None]:
    buckets = {
        bound: count - first.histograms.get(key, {}).get(bound, 0.0)
        for bound, count in last.histograms[key].items()
    }
    count = max(buckets.values(), default=0.0)
    mean = (last.sums[key] - first.sums.get(key, 0.0)) / count if count else None
    found = {"mean": mean, "p50": quantile(buckets, 0.5), "p99": quantile(buckets, 0.99)}
    return {"count": count} | {name: None if one is None else round(one, 5) for name, one in found.items()}


def _grown(samples: Sequence[Sample], key: str) -> float:
    return samples[-1].values[key] - samples[0].values[key]


def _when(samples: Sequence[Sample], key: str, grown: float) -> float:
    """When the counter had grown by `grown`, on a straight line between two samples."""
    wanted = samples[0].values[key] + grown
    for before, after in pairwise(samples):
        low, high = before.values[key], after.values[key]
        if low <= wanted <= high and high > low:
            return before.at_s + (wanted - low) / (high - low) * (after.at_s - before.at_s)
    return samples[-1].at_s


def _at(samples: Sequence[Sample], key: str, at_s: float) -> float:
    for before, after in pairwise(samples):
        if before.at_s <= at_s <= after.at_s and after.at_s > before.at_s:
            share = (at_s - before.at_s) / (after.at_s - before.at_s)
            return before.values[key] + share * (after.values[key] - before.values[key])
    return samples[-1].values[key]


def _mean(samples: Sequence[Sample], key: str, began_s: float, ended_s: float) -> float:
    """Over time, of the samples inside the window."""
    inside = [one for one in samples if began_s <= one.at_s <= ended_s]
    if len(inside) < 2:
        return _at(samples, key, (began_s + ended_s) / 2)
    area = sum(
        (before.values[key] + after.values[key]) / 2 * (after.at_s - before.at_s)
        for before, after in pairwise(inside)
    )
    return area / (inside[-1].at_s - inside[0].at_s)
