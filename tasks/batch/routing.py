"""Which worker gets the next row.

The keeper's registry says who is ready; here is known how many rows each one has of ours and whether it
failed a moment ago. The least loaded worker gets the row; one that failed rests, longer each time, until it
answers again.
"""

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from tasks.errors import StageFailed, Unavailable

IN_FLIGHT_FACTOR = 1.5
"""Rows in flight over sequences that the workers decode at once. Above 1 so that an engine has the next row
at hand when one ends; more only fills its queue (1.1 to 2 is what others found)."""

_FIRST_REST_S = 0.25
_LONGEST_REST_S = 15.0
_FAILURES_OF_ROWS = 2
_BUSY_REST_S = 0.5
"""After a 429 or 503 that does not say how long."""


@dataclass
class Worker:
    """One worker of the pool, as this dispatcher sees it."""

    name: str
    url: str
    max_num_seqs: int
    in_flight: int = 0
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0
    """On the monotonic clock."""

    def failed(self, retry_after_s: float | None, *, may_be_the_rows: bool) -> None:
        """It failed: leave it alone for a moment. Single failures that may be the rows' cost it nothing."""
        self.failures += 1
        if may_be_the_rows and self.failures <= _FAILURES_OF_ROWS:
            return
        longest_s = min(_FIRST_REST_S * 2**self.failures, _LONGEST_REST_S)
        self._until(retry_after_s if retry_after_s is not None else longest_s * random.uniform(0.5, 1.0))

    def is_full(self, retry_after_s: float | None) -> None:
        """It is well and full."""
        self._until(retry_after_s if retry_after_s is not None else _BUSY_REST_S * random.uniform(0.5, 1.5))

    def answered(self) -> None:
        """It works."""
        self.failures = 0

    def _until(self, rest_s: float) -> None:
        self.rests_until = max(self.rests_until, time.monotonic() + rest_s)


class Pool:
    """The ready workers of a pool, kept up to date from its registry."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        registry: str,
        key: str,
        *,
        poll_s: float,
        patience_s: float,
        shares: int = 1,
    ) -> None:
        """
        Args:
            poll_s: how often the registry is asked.
            patience_s: how long no worker may be ready before `Unavailable` is raised.
            shares: dispatchers that use the pool at once; each takes its part of what may be in flight.
        """
        self._session = session
        self._registry = registry
        self._headers = {"Authorization": f"Bearer {key}"}
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._shares = shares
        self._workers: dict[str, Worker] = {}
        self._changed = asyncio.Event()
        self._trouble = "the registry has not answered yet"

    @property
    def limit(self) -> int:
        """Rows that this dispatcher should have in flight; at least 1."""
        sequences = sum(worker.max_num_seqs for worker in self._workers.values())
        return max(1, round(sequences * IN_FLIGHT_FACTOR / self._shares))

    async def keep_up_to_date(self) -> None:
        """Ask the registry again and again; ends only by cancellation.

        Raises:
            StageFailed: it refuses the key.
        """
        while True:
            await self.refresh()
            await asyncio.sleep(self._poll_s)

    async def refresh(self) -> None:
        """Ask the registry once. When it does not answer, what it said last holds.

        Raises:
            StageFailed: it refuses the key.
        """
        try:
            async with self._session.get(
                f"{self._registry}/v1/pool",
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=max(5.0, self._poll_s)),
            ) as response:
                if response.status == 401:
                    raise StageFailed(
                        f"the registry {self._registry} belongs to another pool: it refuses this pool's key. "
                        f"Run the stage start again"
                    )
                response.raise_for_status()
                document = await response.json()
        except (TimeoutError, aiohttp.ClientError, ConnectionError, ValueError) as error:
            self._trouble = f"the registry {self._registry} does not answer ({type(error).__name__})"
            return
        draining = bool(document.get("draining"))
        ready = [one for one in document["workers"] if one["state"] == "ready" and not draining]
        self._trouble = "the pool is draining" if draining else "the registry names no worker that is ready"
        self._take_over(ready)

    async def choose(self) -> Worker:
        """The worker for the next row; waits for one to be ready. Count the row in its `in_flight`.

        Raises:
            Unavailable: none was ready for `patience_s`.
        """
        waits_since = time.monotonic()
        while True:
            now = time.monotonic()
            awake = [worker for worker in self._workers.values() if worker.rests_until <= now]
            if awake:
                return min(
                    awake, key=lambda worker: (worker.in_flight / worker.max_num_seqs, random.random())
                )
            if not self._workers and now - waits_since > self._patience_s:
                raise Unavailable(
                    f"no worker was ready for {self._patience_s:.0f} s: {self._trouble}. What is answered is "
                    f"kept; run the stages start and run again"
                )
            wake_at = min((worker.rests_until for worker in self._workers.values()), default=now + 1.0)
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(max(wake_at - now, 0.01), 1.0))

    def _take_over(self, ready: list[dict[str, object]]) -> None:
        """Keep what is known about workers that stay; one that was replaced has another URL or name."""
        before = self._workers
        self._workers = {}
        for one in ready:
            name, url, sequences = str(one["worker_id"]), str(one["url"]), int(str(one["max_num_seqs"]))
            known = before.get(name)
            if known is not None and known.url == url:
                known.max_num_seqs = sequences
            else:
                known = Worker(name, url, sequences)
            self._workers[name] = known
        if self._workers.keys() != before.keys():
            self._changed.set()
