"""Rows through the project's dispatcher: what a Spark task does, in one process without Spark.

`tasks.batch.answering.answer` is what every Spark task calls: registry, routing, requests, segments with
their flushes. Only the rows come from a list instead of a partition.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import series
from benchmarks.gpu.deployment import Deployment
from benchmarks.gpu.kit import memory_used_bytes
from benchmarks.gpu.loads import Load
from benchmarks.gpu.prompts import Prompts
from benchmarks.gpu.workers import registered
from tasks.batch import segments
from tasks.batch.answering import Job, answer
from tasks.batch.records import Result, Row

_CHUNK = 256
"""Rows at a time, as Spark hands them on (spark.sql.execution.arrow.maxRecordsPerBatch)."""


_SHARE = "p0"
"""Of the batch: all of it."""


def dispatch(
    at: Deployment,
    run_id: str,
    label: str,
    load: Load,
    seed: int,
) -> dict[str, Any]:
    """Ask the rows of `load` and watch the engine's counters."""
    pool, key = at.pool(run_id)
    assert pool.registry is not None
    worker = registered(pool.registry, key)[0]
    asked = Prompts(pool.wanted.release_path).rows(load, seed)
    folder = at.home / "segments" / run_id
    job = Job(
        registry=pool.registry,
        key=key,
        release_id=pool.wanted.release_id,
        # Without an end of its own every answer has the length that was asked for, so runs can be compared.
        sampling={"max_tokens": load.lengths[0][1], "temperature": 0.7, "ignore_eos": True},
        schema=None,
        segments=folder,
        attempt=f"{label}-",
        max_model_len=None,
        proven=True,
        stop_file=at.home / "stop",
        stop_at=time.time() + 3600,
        shares=1,
        request_timeout_s=at.settings.request_timeout_s,
        request_timeout_least_s=at.settings.request_timeout_least_s,
        patience_s=at.settings.engine_patience_s,
        registry_poll_s=at.settings.registry_poll_s,
        flush_s=at.settings.segment_flush_s,
    )
    cpu_before_s = time.process_time()
    with series.Sampler(lambda now_s: series.scrape(worker["url"], now_s)) as sampler:
        tally = answer(job, _chunks(asked), _SHARE)
    cpu_s = time.process_time() - cpu_before_s
    results = list(_results(folder, f"{label}-{_SHARE}-"))
    memory = memory_used_bytes()
    wanted = {row.id: lengths for row, lengths in zip(asked, load.lengths, strict=True)}
    latencies = sorted(result.latency_s for result in results)
    return {
        "run": run_id,
        **load.describe(),
        "max_num_seqs": worker["max_num_seqs"],
        "tally": {"answered": tally.answered, "failed": tally.failed, "given_up": tally.given_up},
        "distinct_ids": len({result.id for result in results}),
        "as_asked": sum(
            (result.prompt_tokens, result.completion_tokens) == wanted[result.id] for result in results
        ),
        "example": results[0].answer[:80] if results and results[0].answer else None,
        "client_cpu_s": round(cpu_s, 2),
        "latency_p50_s": _share(latencies, 0.5),
        "latency_p99_s": _share(latencies, 0.99),
        "memory_used_bytes": memory,
        **series.summary(sampler.samples, load.rows, worker["max_num_seqs"]),
        "trace": [
            [round(one.at_s - sampler.samples[0].at_s, 2), *(one.values[key] for key in _TRACED)]
            for one in sampler.samples[::4]
        ],
        "trace_columns": ["at_s", *_TRACED],
    }


_TRACED = ("finished", "generated_tokens", "running", "waiting")


def _chunks(rows: list[Row]) -> Iterator[list[Row]]:
    for start in range(0, len(rows), _CHUNK):
        yield rows[start : start + _CHUNK]


def _results(folder: Path, prefix: str) -> Iterator[Result]:
    for path in sorted(folder.glob(f"{prefix}*{segments.SUFFIX}")):
        for found in segments.records(path):
            yield Result.from_json(found.document)


def _share(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
