"""First requests: their shapes, and when they end. The server is a stand-in inside the test."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tasks.serving import prewarm, probes
from tasks.serving.launch import Slot
from tasks.settings import Settings
from tests.runs import a_spec

PREPARED = {"rows": 10, "prompt_tokens": 1000, "longest_prompt_tokens": 300}


def test_shapes_are_those_of_the_batch() -> None:
    spec = a_spec(serving={"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 100})
    shapes = prewarm.shapes_of(spec, PREPARED)
    prompts = shapes.prompts()
    assert len(prompts) == 8
    assert prompts[0] == 300
    assert prompts.count(100) == 5, "what fits into eight engine steps"
    assert min(prompts) >= 2, "a prompt of one token kills an engine"


@pytest.mark.parametrize("prepared", [{}, {"rows": 0, "prompt_tokens": 0}, PREPARED])
def test_a_prompt_and_its_answer_always_fit(prepared: dict[str, int]) -> None:
    spec = a_spec(
        serving={"max_model_len": 32, "max_num_seqs": 3},
        batch={"input": "/i", "output": "/o", "prompt": "p", "sampling": {"max_tokens": 4}},
    )
    shapes = prewarm.shapes_of(spec, prepared)
    assert all(2 <= length <= 32 - shapes.answer_tokens for length in shapes.prompts())
    assert shapes.answer_tokens == 4


async def _warm(
    tmp_path: Path, answer: Callable[[int], float], schema: Any = None, refuse: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Warm a server whose nth round of requests takes `answer(n)` seconds, on a clock of its own."""
    bodies: list[dict[str, Any]] = []
    completions = 0
    now_s = 0.0

    async def handle(request: web.Request) -> web.Response:
        nonlocal completions, now_s
        body = await request.json()
        bodies.append(body)
        if refuse and "response_format" in body:
            return web.json_response({"error": "no such schema"}, status=400)
        if "prompt" in body:
            now_s += answer(completions // 4) / 4
            completions += 1
        return web.json_response({"choices": []})

    application = web.Application()
    application.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    shapes = prewarm.Shapes(20, 30, 4, 4, 9, schema)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prewarm, "now_s", lambda: now_s)
            async with probes.session("key") as client:
                url = f"http://127.0.0.1:{port}"
                report = await prewarm.warm(client, url, "tiny", tmp_path, shapes, Settings(), 5)
    finally:
        await runner.cleanup()
    return report, bodies


def test_rounds_end_when_they_are_hardly_faster(tmp_path: Path) -> None:
    slow = [0.6, 0.2, 0.2]
    report, bodies = asyncio.run(_warm(tmp_path, lambda number: slow[min(number, 2)]))
    assert report["stable"]
    assert [one["requests"] for one in report["rounds"]] == [4, 4, 4]
    assert report["rounds"][0]["seconds"] > report["rounds"][1]["seconds"]
    assert len({str(body["prompt"]) for body in bodies}) == 12, "a known prompt would not be prefilled"
    assert "3 round(s) of 4 request(s)" in prewarm.summary(report)


def test_the_batchs_schema_is_asked_once_and_its_refusal_is_no_failure(tmp_path: Path) -> None:
    schema = {"type": "object"}
    report, bodies = asyncio.run(_warm(tmp_path, lambda _: 0.0, schema))
    assert report["structured"] == "answered"
    assert sum("response_format" in body for body in bodies) == 1
    refused, _ = asyncio.run(_warm(tmp_path, lambda _: 0.0, schema, refuse=True))
    assert "no such schema" in refused["structured"]
    assert refused["rounds"]


@pytest.mark.parametrize(
    ("slot", "asked", "rounds"),
    [
        (Slot("a", "cpu", cores=(0,)), None, 0),
        (Slot("a", "mig", uuids=("MIG-1",)), None, 5),
        (Slot("a", "gpus", uuids=("GPU-1",)), None, 5),
        (Slot("a", "cpu", cores=(0,)), 3, 3),
        (Slot("a", "gpus", uuids=("GPU-1",)), 0, 0),
    ],
)
def test_rounds_are_sent_where_kernels_are_compiled_unless_the_deployment_says_otherwise(
    slot: Slot, asked: int | None, rounds: int
) -> None:
    assert prewarm.most_rounds(slot, Settings(prewarm_rounds=asked)) == rounds
