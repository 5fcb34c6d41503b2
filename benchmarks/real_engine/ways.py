"""The ways to ask, each in a process of its own: what it does, and what it costs."""

import asyncio
import json
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.parquet as pq

from benchmarks.dispatcher import job
from tasks.batch.answering import Job, answer
from tasks.batch.records import Row
from tasks.settings import Settings
from tasks.stages import execute

WAYS = ("spark", "dispatcher", "bare loop")
ANSWER_TOKENS = 32
SERVING = {
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "prefix_caching": False,
}
_IN_FLIGHT = 24
"""Of the bare loop: what the dispatcher aims at, 1.5 times max_num_seqs."""


def chats(prompts: Path) -> list[tuple[str, str]]:
    """Ids and chats in JSON."""
    table = pq.read_table(prompts, columns=["row_id", "prompt"]).to_pylist()
    return [(row["row_id"], json.dumps([{"role": "user", "content": row["prompt"]}])) for row in table]


def client(way: str, prompts: Path, home: Path, target: Mapping[str, str]) -> dict[str, Any]:
    """Ask all prompts in this process and its children; what that cost."""
    began = time.monotonic()
    if way == "spark":
        execute("run", target["run"], settings=Settings())
    elif way == "dispatcher":
        rows = [Row(row_id, chat, 1, ANSWER_TOKENS) for row_id, chat in chats(prompts)]
        tally = answer(_job(target, home), iter([rows]), "p0")
        assert tally.answered == len(rows), tally
    else:
        asyncio.run(_bare_loop(prompts, target, home / "answers"))
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "client_s": round(time.monotonic() - began, 1),
        "client_cpu_s": round(sum(one.ru_utime + one.ru_stime for one in (own, children)), 2),
        "largest_process_mb": max(own.ru_maxrss, children.ru_maxrss) // 1024,
    }


def _job(target: Mapping[str, str], folder: Path) -> Job:
    return replace(
        job(target["registry"], folder),
        key=os.environ["BENCH_KEY"],
        release_id=target["release"],
        sampling={"max_tokens": ANSWER_TOKENS, "temperature": 0.0},
    )


async def _bare_loop(prompts: Path, target: Mapping[str, str], path: Path) -> None:
    source = iter(chats(prompts))
    asked = {"model": target["release"], "max_tokens": ANSWER_TOKENS, "temperature": 0.0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['BENCH_KEY']}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        with path.open("w") as file:

            async def ask() -> None:
                for row_id, chat in source:
                    body = f'{json.dumps(asked)[:-1]},"messages":{chat}}}'
                    url = f"{target['worker']}/v1/chat/completions"
                    async with session.post(url, data=body, headers=headers) as response:
                        response.raise_for_status()
                        document = json.loads(await response.read())
                    file.write(json.dumps({"id": row_id, "answer": document["choices"][0]["message"]}) + "\n")

            await asyncio.gather(*(ask() for _ in range(_IN_FLIGHT)))
