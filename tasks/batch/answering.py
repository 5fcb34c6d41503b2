"""Rows in, segments out, in one process: the dispatcher with its connections, its segment and its limits.

Spark's Python workers run it; so does any process without Spark.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from tasks.batch import segments
from tasks.batch.dispatch import Dispatcher
from tasks.batch.engine import Asking, Engine
from tasks.batch.outcomes import Tally
from tasks.batch.pace import Pace
from tasks.batch.records import Result, Row
from tasks.batch.routing import Pool
from tasks.batch.segments import SegmentWriter

_KEEPALIVE_S = 4.0
"""Less than the 5 s after which vLLM's server closes a connection that nobody uses: so no request meets that."""


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
    max_model_len: int | None
    """Where prompts that are too long are cut; None: they are not."""
    proven: bool
    """Whether the batch has answers: then a worker that refuses a row is believed at once."""
    stop_file: Path
    """No row is started once it exists."""
    stop_at: float
    """No row is started after this, in seconds of Unix time."""
    shares: int
    """Dispatchers that work at once."""
    request_timeout_s: float
    """The longest that a row may take; less once it is known how long rows take."""
    request_timeout_least_s: float
    patience_s: float
    registry_poll_s: float
    flush_s: float

    def should_stop(self) -> bool:
        """Whether to start no more rows."""
        return time.time() >= self.stop_at or os.path.exists(self.stop_file)


def answer(job: Job, chunks: Iterator[list[Row]], share: str, *, alone: bool = False) -> Tally:
    """Ask the rows of `chunks` and write what is finished to a segment of its own.

    Rows that an earlier attempt of the same share has finished under this claim are left out: Spark may run a
    task twice. Rows that are set aside are asked alone at the end where no other dispatcher works; else they are
    counted, and to be asked with `alone` when all are done.

    Args:
        share: names this part of the batch; always the same rows.
        alone: ask one row at a time.

    Raises:
        Unavailable: the engines are gone, or bring nothing but trouble.
        StageFailed: the registry refuses the key, the engines refuse every row, or the segment cannot be
            written.
    """
    name = f"{job.attempt}{share}"
    finished = _finished(job.segments, name)
    if finished:
        chunks = _without(finished, chunks)
    with SegmentWriter(job.segments, name) as writer:
        return asyncio.run(_answer(job, chunks, writer, alone))


async def _answer(job: Job, chunks: Iterator[list[Row]], writer: SegmentWriter, alone: bool) -> Tally:
    asking = Asking(job.release_id, job.sampling, job.schema, job.key, job.max_model_len)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
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
            pace=Pace(job.request_timeout_least_s, job.request_timeout_s),
            proven=job.proven,
            should_stop=job.should_stop,
        )
        work = dispatcher.run_alone(chunks) if alone else dispatcher.run(chunks, lane=job.shares == 1)
        working = asyncio.create_task(work)
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


def _finished(folder: Path, name: str) -> dict[str, str | None]:
    """What earlier attempts of this share have written: ids and answers."""
    return {
        result.id: result.answer
        for path in folder.glob(f"{name}-*{segments.SUFFIX}")
        for result in (Result.from_json(found.document) for found in segments.records(path))
    }


def _without(finished: dict[str, str | None], chunks: Iterator[list[Row]]) -> Iterator[list[Row]]:
    """The rows that are not finished; of a session the others too, as what was said before."""
    for chunk in chunks:
        rows = []
        for row in chunk:
            if row.id not in finished:
                rows.append(row)
            elif row.session is not None:
                rows.append(replace(row, finished=json.dumps(finished[row.id])))
        yield rows
