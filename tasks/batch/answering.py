"""Rows in, segments out, in one process: the dispatcher with its connections, its segment and its limits.

Spark's Python workers run it; so does any process without Spark.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tasks.batch import segments
from tasks.batch.dispatch import Dispatcher, Tally
from tasks.batch.engine import Asking, Engine
from tasks.batch.records import Result, Row
from tasks.batch.routing import Pool
from tasks.batch.segments import SegmentWriter


@dataclass(frozen=True)
class Job:
    """What all dispatchers of one run are told. Travels to Spark's Python workers, pickled; never shown."""

    registry: str
    """The keeper's URL."""
    key: str = field(repr=False)
    """The pool's; opens the registry and the workers."""
    release_id: str
    sampling: dict[str, Any]
    schema: dict[str, Any] | None
    segments: Path
    """The folder where finished rows go."""
    attempt: str
    """How the names of this claim's segments begin."""
    proven: bool
    """Whether the batch has answers: then a worker that refuses a row is believed at once."""
    stop_file: Path
    """No row is started once it exists."""
    stop_at: float
    """No row is started after this, in seconds of Unix time."""
    shares: int
    """Dispatchers that work at once."""
    request_timeout_s: float
    patience_s: float
    registry_poll_s: float
    flush_s: float

    def should_stop(self) -> bool:
        """Whether to start no more rows."""
        return time.time() >= self.stop_at or os.path.exists(self.stop_file)


def answer(job: Job, chunks: Iterator[list[Row]], share: str) -> Tally:
    """Ask the rows of `chunks` and write what is finished to a segment of its own.

    Rows that an earlier attempt of the same share has finished under this claim are left out: Spark may run a
    task twice.

    Args:
        share: names this part of the batch; always the same rows.

    Raises:
        Unavailable: the engines are gone, or bring nothing but trouble.
        StageFailed: the registry refuses the key, the engines refuse every row, or the segment cannot be
            written.
    """
    name = f"{job.attempt}{share}"
    finished = _finished(job.segments, name)
    if finished:
        chunks = ([row for row in chunk if row.id not in finished] for chunk in chunks)
    with SegmentWriter(job.segments, name) as writer:
        return asyncio.run(_answer(job, chunks, writer))


async def _answer(job: Job, chunks: Iterator[list[Row]], writer: SegmentWriter) -> Tally:
    asking = Asking(job.release_id, job.sampling, job.schema, job.request_timeout_s, job.key)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector) as session:
        pool = Pool(
            session,
            job.registry,
            job.key,
            poll_s=job.registry_poll_s,
            patience_s=job.patience_s,
            shares=job.shares,
        )
        dispatcher = Dispatcher(
            Engine(session, asking),
            pool,
            writer.append,
            release_id=job.release_id,
            patience_s=max(job.patience_s, 2 * job.request_timeout_s),
            proven=job.proven,
            should_stop=job.should_stop,
        )
        working = asyncio.create_task(dispatcher.run(chunks))
        flushing = asyncio.create_task(_flush_often(writer, job.flush_s))
        try:
            await asyncio.wait({working, flushing}, return_when=asyncio.FIRST_COMPLETED)
            if flushing.done():
                flushing.result()
            return await working
        finally:
            for task in (working, flushing):
                task.cancel()
            await asyncio.gather(working, flushing, return_exceptions=True)


async def _flush_often(writer: SegmentWriter, flush_s: float) -> None:
    """Half of `flush_s` is for waiting, the other half for a slow disk."""
    while True:
        await asyncio.sleep(flush_s / 2)
        await asyncio.to_thread(writer.flush)


def _finished(folder: Path, name: str) -> set[str]:
    """Ids that earlier attempts of this share have written."""
    return {
        Result.from_json(found.document).id
        for path in folder.glob(f"{name}-*{segments.SUFFIX}")
        for found in segments.records(path)
    }
