"""Which worker gets the next row, and when.

The keeper's registry says who is ready and how long each engine's own queue is; here is known how many rows each
one has of ours, and whether it failed a moment ago. Keeps:
- an engine has a few rows waiting and not many: its window follows what it runs, see `Worker.steer`;
- a row goes to the emptiest worker, a turn of a session to the one that has its past;
- a worker that failed rests, longer each time; then it gets one row, and the others when that is answered.
"""

import asyncio
import random
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil

import aiohttp
from yarl import URL

from tasks.errors import StageFailed, Unavailable

_FIRST_WINDOW = 1.5
"""Rows in flight over sequences that the engine decodes at once, until its queue has been seen."""

_WIDEST_WINDOW = 2.0
"""The same, at most: more only waits in the engine, and is lost with it."""

_WAITING_SHARE = 0.15
"""Rows that should wait in an engine, over those that run: so that the next one is at hand when one ends."""

_LEAST_WAITING = 2

_FULL_KV_CACHE = 0.97
"""Above this share an engine preempts: it puts back rows that it had begun."""

_SHRINK = 0.8
_GROWTH = 0.25
_USED = 0.9
"""Share of its window above which a worker may want more than that."""

_FIRST_REST_S = 0.25
_LONGEST_REST_S = 15.0
_FAILURES_OF_ROWS = 2
_BUSY_REST_S = 0.5
"""After a 429 or 503 that does not say how long."""


@dataclass
class Worker:
    """One worker of the pool, as this dispatcher sees it."""

    name: str
    url: URL
    """Where chats are completed."""
    max_num_seqs: int
    share: float
    """Of this worker, that is this dispatcher's before its queue has been seen."""
    window: float = field(init=False)
    """Rows of ours that it may have."""
    in_flight: int = 0
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0
    """On the monotonic clock."""

    def __post_init__(self) -> None:
        self.window = max(1.0, self.max_num_seqs * _FIRST_WINDOW * self.share)

    def steer(self, running: int, waiting: int, kv_cache_usage: float) -> None:
        """Follow the engine's own queue: with nothing waiting take more, with much waiting what it can run.

        All three are of all clients together, a moment ago.
        """
        widest = self.max_num_seqs * _WIDEST_WINDOW
        wanted = max(_LEAST_WAITING, _WAITING_SHARE * running)
        if waiting > 2 * wanted and running:
            # Of what it can take, the part that we have now. Half the way: the registry is as old as its poll.
            ours = (running + wanted) * min(1.0, self.in_flight / (running + waiting))
            self.window = max(1.0, min(widest, (self.window + ours) / 2))
        elif kv_cache_usage > _FULL_KV_CACHE and waiting:
            self.window = max(1.0, self.window * _SHRINK)
        elif waiting < wanted and self.in_flight >= self.window * _USED:
            self.window = min(widest, self.window + max(1.0, self.window * _GROWTH))

    def takes_more(self, now: float) -> bool:
        """Whether it may get a row: it does not rest, has room, and is trusted or gets this one as a trial."""
        return self.in_flight < self.room(now)

    def room(self, now: float) -> float:
        """Rows of ours that it should have."""
        if self.rests_until > now:
            return 0.0
        return 1.0 if self.failures > _FAILURES_OF_ROWS else self.window

    def failed(self, retry_after_s: float | None, *, may_be_the_rows: bool) -> None:
        """It failed: leave it alone for a moment. Single failures that may be the rows' cost it nothing."""
        self.failures += 1
        if may_be_the_rows and self.failures <= _FAILURES_OF_ROWS:
            return
        # Not trusted from now on, whatever the fault was.
        self.failures = max(self.failures, _FAILURES_OF_ROWS + 1)
        longest_s = min(_FIRST_REST_S * 2 ** (self.failures - _FAILURES_OF_ROWS - 1), _LONGEST_REST_S)
        self._until(retry_after_s if retry_after_s is not None else longest_s * random.uniform(0.5, 1.0))

    def is_full(self, retry_after_s: float | None) -> None:
        """It is well and full."""
        self.window = max(1.0, min(self.window, self.in_flight + 1) * _SHRINK)
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
        self._share = 1.0 / shares
        self._workers: dict[str, Worker] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        """In `choose`; as few as rows that met trouble, because `limit` leaves out workers that rest."""
        self._trouble = "the registry has not answered yet"

    @property
    def limit(self) -> int:
        """Rows that this dispatcher should have in flight; at least 1."""
        now = time.monotonic()
        return max(1, sum(ceil(worker.room(now)) for worker in self._workers.values()))

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

    async def choose(self, preferred: str | None = None) -> Worker:
        """The worker for the next row; waits for one that takes it. Count the row in its `in_flight`.

        Args:
            preferred: the name of the worker that has what this row shares with others, if it is there.

        Raises:
            Unavailable: none was ready for `patience_s`.
        """
        waits_since = time.monotonic()
        while True:
            now = time.monotonic()
            takes_more = [worker for worker in self._workers.values() if worker.takes_more(now)]
            for worker in takes_more:
                if worker.name == preferred:
                    return worker
            if takes_more:
                return min(takes_more, key=lambda one: (one.in_flight / one.max_num_seqs, random.random()))
            if not self._workers and now - waits_since > self._patience_s:
                raise Unavailable(
                    f"no worker was ready for {self._patience_s:.0f} s: {self._trouble}. What is answered is "
                    f"kept; run the stages start and run again"
                )
            rests = [worker.rests_until for worker in self._workers.values() if worker.rests_until > now]
            woken = asyncio.get_running_loop().create_future()
            self._waiters.append(woken)
            with suppress(TimeoutError):
                await asyncio.wait_for(woken, min(max(min(rests, default=now + 1.0) - now, 0.01), 1.0))

    async def retry_slots(self) -> None:
        """Have the keeper try those slots again that it gave up; when it does not answer, nothing is lost."""
        with suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
            async with self._session.post(
                f"{self._registry}/v1/pool/retry",
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=5.0),
            ):
                pass

    def has_room(self) -> None:
        """A row is back: one who waits in `choose` may look again."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _take_over(self, ready: list[dict[str, object]]) -> None:
        """Keep what is known about workers that stay; one that was replaced has another URL or name."""
        before = self._workers
        self._workers = {}
        for one in ready:
            name, sequences = str(one["worker_id"]), int(str(one["max_num_seqs"]))
            url = URL(f"{one['url']}/v1/chat/completions")
            known = before.get(name)
            if known is None or known.url != url:
                known = Worker(name, url, sequences, self._share)
            known.max_num_seqs = sequences
            known.steer(
                int(str(one.get("running") or 0)),
                int(str(one.get("waiting") or 0)),
                float(str(one.get("kv_cache_usage") or 0.0)),
            )
            self._workers[name] = known
        if self._workers.keys() - before.keys():
            for _ in range(len(self._waiters)):
                self.has_room()
