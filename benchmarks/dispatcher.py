"""What the dispatcher costs beside a bare aiohttp loop, against one engine of fixed capacity, in one run.

    .venv/bin/python -m benchmarks.dispatcher [ROWS ...]          # 10000 100000 by default; 1000000 takes minutes

For each number of rows, two comparisons, each of fresh client processes in turn:
- an engine that answers at once: CPU of the client for a row, its memory;
- an engine of 64 places of 50 ms each (1280 rows/s at most): how much of that is used between 10% and 90% of the rows.
The engine is pinned to one core and the client to another where there are two. Figures of rates are the engine's own.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tasks.batch.answering import Job, answer
from tasks.batch.records import Row

KINDS = ("bare loop", "dispatcher")
_IN_FLIGHT = 96
_ROUNDS = 2
_QUESTION = "What is said in this text, in one sentence? " + "Some words that stand for a text. " * 6


def rows(count: int) -> Iterator[list[Row]]:
    """Made as they are read, so that memory is the dispatcher's own."""
    for start in range(0, count, 256):
        yield [
            Row(f"row-{n}", json.dumps([{"role": "user", "content": f"{n} {_QUESTION}"}]), 60, 64)
            for n in range(start, min(start + 256, count))
        ]


def client(kind: str, count: int, url: str) -> dict[str, Any]:
    """Ask `count` rows in this process."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu_s, began = time.process_time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if kind == "bare loop":
            asyncio.run(bare_loop(count, url, Path(folder) / "answers"))
        else:
            tally = answer(job(url, Path(folder)), rows(count), "p0")
            assert tally.answered == count, tally
    return {
        "seconds": round(time.monotonic() - began, 2),
        "cpu_ms_per_row": round(1000 * (time.process_time() - cpu_s) / count, 4),
        "grew_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024, 1),
    }


async def bare_loop(count: int, url: str, path: Path) -> None:
    """The least that asks all rows and keeps the answers: no retry, no check, no order, nothing durable."""
    source = (row for chunk in rows(count) for row in chunk)
    head = json.dumps({"model": "release-1", "max_tokens": 64})[:-1]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        with path.open("w") as file:

            async def ask() -> None:
                for row in source:
                    body = f'{head},"messages":{row.messages}}}'
                    async with session.post(
                        f"{url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
                    ) as response:
                        document = json.loads(await response.read())
                    text = document["choices"][0]["message"]["content"]
                    file.write(json.dumps({"id": row.id, "answer": text}) + "\n")

            await asyncio.gather(*(ask() for _ in range(_IN_FLIGHT)))


def job(url: str, folder: Path) -> Job:
    """As the driver makes it."""
    return Job(
        registry=url,
        key="key",
        release_id="release-1",
        sampling={"max_tokens": 64, "temperature": 0.0},
        schema=None,
        segments=folder,
        attempt="a-",
        max_model_len=None,
        proven=True,
        stop_file=folder / "stop",
        stop_at=time.time() + 86400,
        shares=1,
        request_timeout_s=600.0,
        request_timeout_least_s=60.0,
        patience_s=60.0,
        registry_poll_s=1.0,
        flush_s=2.0,
    )


@contextmanager
def engine(latency_s: float, token_s: float = 0.0) -> Iterator[str]:
    """A `fixed_engine` in a process of its own; its address."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "benchmarks.fixed_engine",
            "--latency-s",
            str(latency_s),
            "--token-s",
            str(token_s),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        port = int(process.stdout.readline())
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {cores[-1]})
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        process.wait()


def in_a_process(kind: str, count: int, url: str) -> dict[str, Any]:
    """`client` in a fresh process, and what the engine says of it."""
    urllib.request.urlopen(f"{url}/reset").read()
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "benchmarks.dispatcher", "--client", kind, "--url", url, str(count)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    return {**json.loads(done.stdout), **json.loads(urllib.request.urlopen(f"{url}/report").read())}


def measure(counts: list[int]) -> Iterator[dict[str, Any]]:
    """A line for each number of rows, engine and kind of client: medians over the rounds."""
    for count in counts:
        for name, latency_s in (("answers at once", 0.0), ("64 places of 50 ms", 0.05)):
            if latency_s and count > 100_000:
                continue
            rounds = 1 if count > 100_000 else _ROUNDS
            with engine(latency_s) as url:
                found = [(kind, in_a_process(kind, count, url)) for _ in range(rounds) for kind in KINDS]
            for kind in KINDS:
                of_kind = [figures for name_, figures in found if name_ == kind]
                yield {"rows": count, "engine": name, "client": kind, **_medians(of_kind)}


def _medians(found: list[dict[str, Any]]) -> dict[str, float]:
    """Of what was measured each time: an engine that answers at once may have no steady part to speak of."""
    keys = [key for key in found[0] if all(one[key] is not None for one in found)]
    return {key: round(statistics.median(one[key] for one in found), 4) for key in keys}


def main() -> None:
    """Print a JSON object a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--client", choices=KINDS)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    if options.client:
        print(json.dumps(client(options.client, options.rows[0], options.url)))
        return
    for line in measure(options.rows):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
