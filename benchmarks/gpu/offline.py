"""The same rows through `vllm.LLM.generate`: no server, no HTTP, no JSON. The limit that the dispatcher is held to.

Runs in the serving environment, with the engine set up exactly as a worker is. Prompts go in as token ids.
"""

from typing import Any

from benchmarks.gpu import series
from benchmarks.gpu.engine import FLAGS, arguments
from benchmarks.gpu.kit import Kit, Stopwatch, memory_used_bytes
from benchmarks.gpu.loads import Load, parse
from benchmarks.gpu.prompts import Prompts
from tasks.spec import Serving


def offline(
    kit: Kit,
    model: str,
    given: dict[str, Any],
    loads: list[Load],
    seed: int,
    on_gpu: bool = True,
) -> list[dict[str, Any]]:
    """One engine, then each of `loads`, after a first batch that warms it."""
    from vllm import LLM, SamplingParams

    serving = Serving(**given)
    flags = {**FLAGS, **serving.extra_args} if on_gpu else {"kv_cache_memory_bytes": 2**28}
    watch = Stopwatch()
    engine = LLM(
        model=str(kit.model(model)),
        max_model_len=serving.max_model_len,
        max_num_seqs=serving.sequences,
        max_num_batched_tokens=serving.max_num_batched_tokens,
        gpu_memory_utilization=serving.gpu_memory_utilization,
        kv_cache_dtype=serving.kv_cache_dtype,
        enable_prefix_caching=serving.prefix_caching,
        enforce_eager=serving.enforce_eager,
        disable_log_stats=False,
        **arguments(flags),
    )
    start_s = watch.lap_s()
    prompts = Prompts(kit.model(model))

    def prepared(load: Load, seed: int) -> tuple[list[Any], list[Any]]:
        asked = [{"prompt_token_ids": prompts.ids(content)} for content in prompts.contents(load, seed)]
        sampling = [
            SamplingParams(max_tokens=answer, temperature=0.7, ignore_eos=True) for _, answer in load.lengths
        ]
        return asked, sampling

    engine.generate(*prepared(parse(f"256x32x{min(64, serving.sequences)}"), seed + 1), use_tqdm=False)
    warm_s = watch.lap_s()
    found = []
    for number, load in enumerate(loads):
        given_in = prepared(load, seed + 10 * number)
        with series.Sampler(lambda now_s: series.from_reader(engine.get_metrics(), now_s)) as sampler:
            outputs = engine.generate(*given_in, use_tqdm=False)
        stats = [output.metrics for output in outputs if output.metrics is not None]
        found.append(
            {
                "model": model,
                "serving": given,
                "start_s": start_s,
                "first_batch_s": warm_s,
                "load": load.name,
                **load.describe(),
                "max_num_seqs": serving.sequences,
                "as_asked": sum(
                    (len(output.prompt_token_ids), len(output.outputs[0].token_ids)) == lengths
                    for output, lengths in zip(outputs, load.lengths, strict=True)
                ),
                "memory_used_bytes": memory_used_bytes(),
                **series.summary(sampler.samples, load.rows, serving.sequences),
                "exact": _exact(stats),
            }
        )
    return found


def _exact(stats: list[Any]) -> dict[str, Any]:
    """Per request, from the engine's own times; both clocks are the engine's."""
    first = sorted(one.first_token_ts - one.scheduled_ts for one in stats)
    each = sorted(
        (one.last_token_ts - one.first_token_ts) / (one.num_generation_tokens - 1)
        for one in stats
        if one.num_generation_tokens > 1
    )
    return {
        name: {"p50": round(values[len(values) // 2], 5), "p99": round(values[int(0.99 * len(values))], 5)}
        for name, values in (("scheduled_to_first_token_s", first), ("time_per_token_s", each))
        if values
    }
