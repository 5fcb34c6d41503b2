"""A stand-in for `vllm serve`, for tests of what is around it. Says so in its log and in every answer.

Speaks the few endpoints that the pipeline uses and forks an "engine" into its session, as vLLM does: every answer
comes through it, /health does not, and the server ends when it has ended.
Faults come by environment: STANDIN_FAIL (text to print before it ends with status 1), STANDIN_FAIL_ONCE (a
file: fails as long as it exists, and deletes it), STANDIN_START_S (seconds until it listens), STANDIN_DEAF
(ignores SIGTERM). STANDIN_LATENCY_S is how long an answer takes, STANDIN_REQUESTS a file to which every prompt
that was answered whole is appended.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

_ENGINE = """
import sys, time
open("/proc/self/comm", "w").write("VLLM::EngineCore")
for line in sys.stdin:
    print(line, end="", flush=True)
time.sleep(3600)  # as vLLM's, it outlives a server that is killed
"""


class _Engine:
    """A child that gives back each line that it is sent."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()
        self.tokens = 0

    @classmethod
    async def start(cls) -> "_Engine":
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(sys.executable, "-c", _ENGINE, stdin=pipe, stdout=pipe)
        )

    async def generate(self, tokens: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._turn:
            self._process.stdin.write(b"token\n")
            await self._process.stdout.readline()
        self.tokens += tokens

    async def end_with_it(self) -> None:
        await self._process.wait()
        print(os.environ.get("STANDIN_LAST_WORDS", "EngineDeadError"), flush=True)
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--served-model-name", required=True)
    known, _ = parser.parse_known_args()
    print(f"this is a stand-in for vllm serve {known.model}", flush=True)
    if "STANDIN_DEAF" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "STANDIN_FAIL" in os.environ:
        sys.exit(os.environ["STANDIN_FAIL"])
    once = Path(os.environ.get("STANDIN_FAIL_ONCE", "/nonexistent"))
    if once.exists():
        says = once.read_text()
        once.unlink()
        sys.exit(says)
    asyncio.run(_serve(known))


async def _serve(known: argparse.Namespace) -> None:
    await asyncio.sleep(float(os.environ.get("STANDIN_START_S", "0")))
    engine = await _Engine.start()
    ending = asyncio.create_task(engine.end_with_it())
    if shared := os.environ.get("STANDIN_SHM"):
        os.open(shared, os.O_CREAT | os.O_RDWR, 0o600)  # and kept open
    key = f"Bearer {os.environ['QWEN_POOL_KEY']}"

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(request: web.Request) -> web.Response:
        busy = (
            'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
            'vllm:num_requests_waiting_by_reason{reason="capacity"} 7.0\n'
        )
        made = f'vllm:generation_tokens_total{{engine="0"}} {engine.tokens}.0\n'
        return web.Response(text=made + (busy if "STANDIN_BUSY" in os.environ else ""))

    async def models(request: web.Request) -> web.Response:
        return _refused() if request.headers.get("Authorization") != key else web.json_response({"data": []})

    async def chat(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != key:
            return _refused()
        body = await request.json()
        if body["model"] != known.served_model_name:
            return web.json_response({"error": f"no model {body['model']}"}, status=404)
        await asyncio.sleep(float(os.environ.get("STANDIN_LATENCY_S", "0")))
        await engine.generate(5)
        if "STANDIN_REQUESTS" in os.environ and "messages" in body:  # and not a canary
            with open(os.environ["STANDIN_REQUESTS"], "a", encoding="utf-8") as log:
                log.write(json.dumps(body["messages"][-1]["content"]) + "\n")
        message = {"role": "assistant", "content": "an answer of a stand-in"}
        usage = {"prompt_tokens": 9, "completion_tokens": 5}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        if nats := os.environ.get("STANDIN_NATS"):  # of each token of a prompt
            told = [{str(token): {"logprob": -float(nats)}} for token in body.get("prompt", [])]
            choices[0]["prompt_logprobs"] = [None, *told[1:]]
        return web.json_response({"model": known.served_model_name, "choices": choices, "usage": usage})

    application = web.Application()
    application.router.add_get("/health", health)
    application.router.add_get("/metrics", metrics)
    application.router.add_get("/v1/models", models)
    application.router.add_post("/v1/chat/completions", chat)
    application.router.add_post("/v1/completions", chat)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, known.host, known.port).start()
    await ending


def _refused() -> web.Response:
    return web.json_response({"error": "Unauthorized"}, status=401)


if __name__ == "__main__":
    main()
