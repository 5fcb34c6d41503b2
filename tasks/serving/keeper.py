"""The keeper: one process for each pool, which parents its workers and outlives the stage that started it.

    python -m tasks.serving.keeper --pool ID --epoch N

Keeps:
- no worker outlives the lease: the keeper ends its pool by its own clock, with the ledger gone too;
- a keeper whose claim has ended (another start, stop, or the reaper) ends its pool;
- a pool that nobody can use any more ends: its run's deadline is over;
- a pool with fewer workers than the spec's minimum ends: slots that keep failing were given up;
- on SIGTERM it lets requests finish for a moment, ends its workers, and goes;
- when it is killed itself the kernel kills the servers, and a scan finds what they forked (`leftovers`).
"""

import argparse
import asyncio
import logging
import signal
import sys
from datetime import UTC, datetime
from typing import Any

from tasks import pool_key, tuning
from tasks import settings as deployment
from tasks.errors import InputError, StageError
from tasks.ledger import Claim, Ledger, Run
from tasks.ledger import load as load_run
from tasks.ledger.claims import facts_of
from tasks.node import lock
from tasks.node.processes import this_process
from tasks.serving import (
    compile_cache,
    device_memory,
    loading,
    log_files,
    pools,
    ports,
    prewarm,
    probes,
    registry,
    scratch,
)
from tasks.serving.line import Line, now_s
from tasks.serving.pools import Pool
from tasks.serving.server import Job
from tasks.serving.worker import Worker
from tasks.settings import Settings
from tasks.spec import Serving

log = logging.getLogger("tasks.serving.keeper")

_PATIENCE_S = 5.0
"""Of one attempt to reach the ledger; the keeper does not wait for it, it only tries again."""

_FIRST_RENEWAL_S = 60.0
"""How long a keeper waits for its lease to be confirmed, before it has started anything."""

_LONGER_S = 3600.0
"""A pool is kept beyond its run's deadline for whoever mends the run by hand."""

_LAST_WRITES_S = 3.0
_WATCH_S = 0.2
_CLEAN_EVERY_S = 30.0
_OWN_LOG = "keeper"
_DRAIN_POLL_S = 0.1


class Keeper:
    """A pool's workers, its registry and its line to the ledger."""

    def __init__(self, pool: Pool, job: Job, claim: Claim, useful_s: float) -> None:
        """
        Args:
            useful_s: how long from now its run can use it.
        """
        self._pool = pool
        self._job = job
        self._claim = claim
        self._settings = job.settings
        self._workers: list[Worker] = []
        self._why_over: str | None = None
        self._claim_lost = False
        # Until a first renewal tells how long the lease really holds.
        self._ends_at = now_s() + _FIRST_RENEWAL_S
        self._is_held = asyncio.Event()
        self._draining = False
        self._was_whole = False
        self._useless_at = now_s() + useful_s

    async def keep(self) -> str:
        """Hold the pool until it must end; returns why it did."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, f"asked to end by {number.name}")
        line = Line(self._claim, self._pool.wanted.lease_id, self._settings, self._renewed, self._lost)
        line.open()
        listening = ports.listen(self._settings.serve_host, self._settings.port_range)
        answering = await registry.serve(
            listening, self._job.key, self._describe, self._try_again, self._tail
        )
        self._record_started(line, listening.getsockname()[1])
        turns = asyncio.Semaphore(loading.at_once(self._job, len(self._pool.wanted.slots)))
        async with probes.session(self._job.key) as client:
            self._workers = [
                Worker(
                    number,
                    slot,
                    self._job,
                    client=client,
                    record=line.write,
                    queries=self._claim.ledger.queries,
                    turns=turns,
                )
                for number, slot in enumerate(self._pool.wanted.slots)
            ]
            tending = [asyncio.create_task(self._tend(worker)) for worker in self._workers]
            tending.append(asyncio.create_task(self._keep_the_disk_free()))
            try:
                await self._until_over(tending)
                await self._drain()
            finally:
                for task in tending:
                    task.cancel()
                await asyncio.gather(*tending, return_exceptions=True)
                stopped = await asyncio.gather(
                    *(worker.stop() for worker in self._workers), return_exceptions=True
                )
        for result in stopped:
            if isinstance(result, BaseException):
                log.error("a worker could not be stopped", exc_info=result)
        await self._record_end(line)
        await answering.cleanup()
        return self._why_over or "unknown"

    async def _tend(self, worker: Worker) -> None:
        await self._is_held.wait()
        await worker.tend()

    async def _until_over(self, tending: list["asyncio.Task[None]"]) -> None:
        # Ending takes a while too, and must be over when the lease is.
        ending_s = self._settings.drain_s + self._settings.stop_grace_s + _LAST_WRITES_S
        margin_s = min(ending_s, self._settings.lease_s / 4, _FIRST_RENEWAL_S / 4)
        while self._why_over is None:
            if now_s() > self._ends_at - margin_s:
                self._end("the lease expires and could not be renewed")
            if now_s() > self._useless_at:
                self._end("the deadline of its run is over")
            for task in tending:
                if task.done():
                    task.result()  # a defect; ends the keeper, which ends its pool
            self._end_when_too_few_are_left()
            await asyncio.sleep(_WATCH_S)
        log.info("the pool ends: %s", self._why_over)

    def _end_when_too_few_are_left(self) -> None:
        """Only once it served: until then whoever starts the pool reads why, and decides."""
        given_up = [worker for worker in self._workers if worker.given_up is not None]
        left, least = len(self._workers) - len(given_up), self._job.serving.min_workers
        # One that was ready and given up between two looks did serve: else its pool would go on for ever.
        self._was_whole = self._was_whole or sum(one.served for one in self._workers) >= least
        if self._was_whole and left < min(least, len(self._workers)):
            self._end(
                f"{left} of {len(self._workers)} worker(s) are left, and serving.min_workers is {least}; the "
                f"last one given up: {given_up[-1].message}"
            )

    async def _keep_the_disk_free(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._clean_up)
            except OSError as error:
                # A disk that fails is no reason to end a pool that serves.
                log.warning("logs and old caches are not bounded for the moment: %s", error)
            await asyncio.sleep(_CLEAN_EVERY_S)

    def _clean_up(self) -> None:
        settings = self._settings
        for name in (_OWN_LOG, *(worker.worker_id for worker in self._workers)):
            log_files.bound(self._job.log(name), settings.log_max_mb * 2**20, settings.log_keep)
        compile_cache.forget_old(settings)

    def _tail(self, worker_id: str, lines: int) -> list[str] | None:
        """The newest lines of a worker's log, or of `keeper`'s; None for a name that is none of these."""
        if worker_id not in {_OWN_LOG, *(worker.worker_id for worker in self._workers)}:
            return None
        return log_files.tail(self._job.log(worker_id), lines)

    async def _drain(self) -> None:
        """Send no one new to the workers, and let them finish what they have, for a moment."""
        self._draining = True
        deadline = min(now_s() + self._settings.drain_s, self._ends_at)
        async with probes.session(self._job.key) as client:
            while now_s() < deadline:
                ready = [worker.url for worker in self._workers if worker.state == "ready"]
                looks = await asyncio.gather(*(probes.look(client, url) for url in ready))
                if all(look is None or look.load.idle for look in looks):
                    return
                await asyncio.sleep(_DRAIN_POLL_S)

    def _describe(self) -> dict[str, Any]:
        return {
            "pool_id": self._pool.pool_id,
            "model": self._job.release_id,
            "draining": self._draining,
            "workers": [worker.describe() for worker in self._workers],
        }

    def _try_again(self) -> None:
        for worker in self._workers:
            worker.try_again()

    def _renewed(self, until_s: float) -> None:
        self._ends_at = until_s
        self._is_held.set()

    def _lost(self, reason: str) -> None:
        self._claim_lost = True
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._why_over is None:
            self._why_over = reason

    def _record_started(self, line: Line, port: int) -> None:
        host = self._settings.serve_host
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        process = this_process()
        values = {
            "pool_id": self._pool.pool_id,
            "registry": url,
            "host": process.host,
            "boot_id": process.boot_id,
            "pid": process.pid,
            "start_ticks": process.start_ticks,
        }
        queries = self._claim.ledger.queries
        line.write(lambda connection: queries.pool_started(connection, **values))

    async def _record_end(self, line: Line) -> None:
        """Close the pool in the ledger, when this is still ours to do and nothing is left of it."""
        is_gone = all(worker.is_gone for worker in self._workers)
        if is_gone:
            scratch.remove(scratch.of_run(self._pool.run_id))
        if is_gone and not self._claim_lost:
            queries = self._claim.ledger.queries
            values = {"pool_id": self._pool.pool_id, "reason": self._why_over}
            line.write(lambda connection: queries.end_pool(connection, **values))
        await line.close(self._why_over or "unknown", _LAST_WRITES_S)


def main(arguments: list[str] | None = None) -> int:
    """Keep the pool that is named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m tasks.serving.keeper", description=__doc__)
    parser.add_argument("--pool", required=True, help="its id in the ledger")
    parser.add_argument("--epoch", required=True, type=int, help="of the run's claim `keeper`")
    given = parser.parse_args(arguments)
    settings = deployment.current()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return _keep(given.pool, given.epoch, settings)
    except StageError as error:
        log.error("%s", error)
        return error.exit_status


def _keep(pool_id: str, epoch: int, settings: Settings) -> int:
    with Ledger(settings.database_url(), settings.sql, patience_s=_PATIENCE_S) as ledger:
        pool = pools.load(ledger, pool_id)
        if pool is None:
            raise InputError(f"there is no pool {pool_id!r} in the ledger")
        run = load_run(ledger, pool.run_id)
        claim = Claim(ledger, pool.run_id, "keeper", epoch)
        claim.hand_over(this_process())
        prepared = facts_of(ledger, pool.run_id, "prepare") or {}
        serving = _settled(run.spec.serving, pool, settings)
        ledger.close()  # from here on only the line speaks to it
        job = Job(
            pool_id,
            pool.run_id,
            pool.wanted.release_id,
            pool.wanted.release_path,
            serving,
            pool_key.derive(settings.secret(), pool_id),
            settings,
            prewarm.shapes_of(run.spec.model_copy(update={"serving": serving}), prepared),
        )
        lock_file = settings.locks / f"{pool.run_id}-keeper.lock"
        with lock.held(lock_file, f"keeper of pool {pool_id}", settings.lock_wait_s):
            reason = asyncio.run(Keeper(pool, job, claim, useful_s(run, settings)).keep())
    log.info("ended: %s", reason)
    return 0


def _settled(serving: Serving, pool: Pool, settings: Settings) -> Serving:
    """What the spec leaves open, from the table of what was measured on one whole GPU."""
    slots = pool.wanted.slots
    whole = all(slot.kind == "gpus" and len(slot.uuids) == 1 for slot in slots)
    kinds = {device_memory.kind(slot, settings) for slot in slots} if whole else set()
    gpu = kinds.pop() if len(kinds) == 1 else ""
    line = tuning.find(gpu, tuning.config_of(pool.wanted.release_path))
    found = tuning.settled(serving, line)
    if line is not None and found != serving:
        log.info("serving.max_num_seqs is %d: %s", found.sequences, line.why)
    return found


def useful_s(run: Run, settings: Settings) -> float:
    """Until the run's deadline and its last requests; long enough for a start in any case."""
    left_s = (run.deadline - datetime.now(UTC)).total_seconds()
    return max(left_s, settings.start_timeout_s) + settings.request_timeout_s + _LONGER_S


if __name__ == "__main__":
    sys.exit(main())
