"""A worker is believed when it thinks of held-out text what was measured; not when it merely answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tasks.serving import probes, reading
from tasks.settings import Settings

TOKENS = [7, 8, 9]


def told(*nats: float) -> dict[str, Any]:
    """What vLLM says of `TOKENS`: nothing of the first, of the others also what else it had in mind."""
    after_the_first = [
        {str(token): {"logprob": -value}, "1": {"logprob": -0.1}}
        for token, value in zip(TOKENS[1:], nats, strict=True)
    ]
    return {"choices": [{"prompt_logprobs": [None, *after_the_first]}]}


def prove(
    release: Path, answer: dict[str, Any], status: int = 200, measured: Any = 2.0
) -> tuple[str, list[dict[str, Any]]]:
    """Prove a server that says `answer`, of a release whose manifest says `measured`; also what it was asked."""
    if measured is not None:
        document = {"version": 1, "files": {}, "reading": {"tokens": TOKENS, "nats": measured}}
        (release / "manifest.json").write_text(json.dumps(document))
    asked: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response(answer, status=status)

    async def act() -> str:
        application = web.Application()
        application.router.add_post("/v1/completions", handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            async with probes.session("key") as client:
                return await reading.prove(client, f"http://127.0.0.1:{port}", "tiny", release, Settings())
        finally:
            await runner.cleanup()

    return asyncio.run(act()), asked


def test_a_worker_that_thinks_what_was_measured_is_believed(tmp_path: Path) -> None:
    found, (asked,) = prove(tmp_path, told(1.9, 2.3))

    assert found == "2.100 nats a token, measured were 2.000"
    assert asked["prompt"] == TOKENS
    assert asked["model"] == "tiny"


@pytest.mark.parametrize("nats", [(2.0, 2.7), (0.1, 0.1), (float("nan"), 2.0)])
def test_a_worker_that_thinks_otherwise_is_not_though_it_answers(
    tmp_path: Path, nats: tuple[float, float]
) -> None:
    with pytest.raises(reading.Misread, match=r"reads tiny differently .* where 2\.000 were measured"):
        prove(tmp_path, told(*nats))


def test_an_answer_that_leaves_tokens_out_proves_nothing(tmp_path: Path) -> None:
    answer = told(2.0, 2.0)
    answer["choices"][0]["prompt_logprobs"].pop()

    with pytest.raises(reading.Misread, match="nan nats"):
        prove(tmp_path, answer)


def test_what_cannot_be_asked_is_said_and_ends_nothing(tmp_path: Path) -> None:
    assert prove(tmp_path, {"error": "too long"}, status=400)[0].startswith("refused: ")
    assert "tells no probabilities" in prove(tmp_path, {"choices": [{"text": "x"}]})[0]


def test_of_weights_as_downloaded_nothing_was_measured(tmp_path: Path) -> None:
    assert prove(tmp_path, {}, measured=None) == ("nothing was measured", [])
    (tmp_path / "manifest.json").write_text('{"version": 1, "files": {}}')
    assert prove(tmp_path, {}, measured=None) == ("nothing was measured", [])


def test_a_worker_that_fails_to_answer_is_no_misreading(tmp_path: Path) -> None:
    with pytest.raises(probes.NoAnswer, match="status 500"):
        prove(tmp_path, {}, status=500)
