"""An actor that has lost its claim ends itself.

A successor on the same host ends its predecessor; one on another host cannot. So every actor looks every few
seconds whether its claim is still live. When it is not, the process ends at once, without cleaning up: its
successor owns the world now, and the kernel drops its node lock and kills its tied children.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from tasks.errors import Fenced, Unavailable
from tasks.ledger import Claim

log = logging.getLogger(__name__)


def end_this_process() -> None:
    """End without cleaning up; exit status 4 as for every failed stage."""
    logging.shutdown()
    os._exit(Fenced.exit_status)


@contextmanager
def watching(claim: Claim, every_s: float, on_loss: Callable[[], None] = end_this_process) -> Iterator[None]:
    """For the length of the block, call `on_loss` as soon as `claim` is seen to have ended.

    A ledger that does not answer is no loss: the claim is looked at again when it does.
    """
    own = claim.in_thread()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            try:
                if own.is_live() or over.is_set():
                    continue
            except (Unavailable, psycopg.Error):
                continue
            log.error(
                "stage %s of run %s was claimed again; epoch %d ends here",
                own.stage,
                own.run_id,
                own.epoch,
            )
            on_loss()
            return

    thread = threading.Thread(target=watch, name=f"watch-{claim.stage}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        own.ledger.close()
