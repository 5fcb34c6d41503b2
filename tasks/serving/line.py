"""The keeper's line to the ledger.

One thread, so that a database that is slow, gone or hanging never holds up the keeper: what it writes waits
in line, in order, and the lease's renewal is simply not confirmed. It ends for good when the keeper's claim
or its lease has.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import psycopg

from tasks.errors import Fenced, StageError, Unavailable
from tasks.ledger import Claim, leases
from tasks.ledger.connection import Connection
from tasks.serving import pools
from tasks.settings import Settings

log = logging.getLogger(__name__)

Write = Callable[[Connection], None]

_RETRY_S = 1.0


def now_s() -> float:
    """Seconds on a clock that no one sets and that goes on while the host sleeps (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class _Pending:
    write: Write
    written: "Future[None]"


class Line:
    """Writes for the keeper, renews its lease, and tells it when it must end.

    Args:
        lease_id: what to renew; None: being the holder of the claim is enough.
        on_renewed: called in the keeper's loop with the time on `now_s` until which the pool may live.
        on_lost: called there once, with the reason, when the pool must end.
    """

    def __init__(
        self,
        claim: Claim,
        lease_id: int | None,
        settings: Settings,
        on_renewed: Callable[[float], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._claim = claim.in_thread()
        self._lease_id = lease_id
        self._settings = settings
        self._on_renewed = on_renewed
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Pending] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._reason = ""
        self._renew_at = 0.0
        # A daemon: a thread that hangs in the database must not keep the keeper from ending.
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)

    def open(self) -> None:
        """Begin to renew and to write."""
        self._thread.start()

    def write(self, write: Write) -> "asyncio.Future[None]":
        """Put `write` in line; it runs in one transaction under the claim. The result may be ignored."""
        pending = _Pending(write, Future())
        with self._changed:
            self._waiting.append(pending)
            self._changed.notify()
        future = asyncio.wrap_future(pending.written, loop=self._loop)
        future.add_done_callback(_nobody_has_to_look)
        return future

    async def close(self, reason: str, wait_s: float) -> None:
        """Write what is in line and finish the claim, as far as that takes no longer than `wait_s`."""
        with self._changed:
            self._reason = reason
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, wait_s)

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._renew_when_due()
                    self._write_waiting()
                except (Unavailable, psycopg.Error) as error:
                    # Whatever ails the ledger: the keeper's own clock ends the pool, and not before its lease is over.
                    log.warning("the ledger does not answer: %s", error)
                    if self._closing:
                        return
                    time.sleep(_RETRY_S)
            self._claim.finish("done", self._reason, {})
        except StageError as error:  # Fenced, or the lease is not held any more
            self._tell(self._on_lost, str(error))
        except Exception as error:
            log.exception("the line to the ledger broke")
            self._tell(self._on_lost, f"the line to the ledger broke: {type(error).__name__}: {error}")
        finally:
            self._claim.ledger.close()
            for pending in self._waiting:
                pending.written.cancel()

    def _wait_for_work(self) -> bool:
        """Until there is something to do; False when there will be nothing more."""
        with self._changed:
            if not self._waiting and not self._closing:
                self._changed.wait(timeout=self._settings.claim_watch_s)
            return bool(self._waiting) or not self._closing

    def _renew_when_due(self) -> None:
        began = now_s()
        if self._closing:
            return
        if not self._claim.is_live():
            raise Fenced("the keeper's claim has ended")
        with self._claim.ledger.transaction() as connection:
            is_open = pools.run_is_open(connection, self._claim)
        if not is_open:
            self._tell(self._on_lost, "the run is closed")
        elif began >= self._renew_at:
            if self._lease_id is not None:
                leases.renew(self._claim, self._lease_id, self._settings.lease_s)
            # Counted from before it was asked for, so that it never ends later than the ledger says.
            self._tell(self._on_renewed, began + self._settings.lease_s)
            self._renew_at = began + self._settings.lease_renew_s

    def _write_waiting(self) -> None:
        while self._waiting:
            pending = self._waiting[0]
            try:
                with self._claim.writing() as connection:
                    pending.write(connection)
            except StageError:
                raise
            except Exception as error:
                # A record that is lost is bad; a pool that ends because of it is worse.
                log.exception("a record of the keeper could not be written")
                pending.written.set_exception(error)
            else:
                pending.written.set_result(None)
            with self._changed:
                self._waiting.popleft()

    def _tell(self, listener: Callable[..., None], *what: object) -> None:
        try:
            self._loop.call_soon_threadsafe(listener, *what)
        except RuntimeError:
            log.info("the keeper has ended already")


def _nobody_has_to_look(future: "asyncio.Future[None]") -> None:
    if not future.cancelled():
        future.exception()
