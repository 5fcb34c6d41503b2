"""An actor that has lost its claim ends itself.

A successor on the same host ends its predecessor; one on another host cannot. So every actor looks every few
seconds whether its claim is still live. When it is not, the process ends at once, without cleaning up: its
successor owns the world now, and the kernel drops its node lock and kills its tied children.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

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

    def look(own: Claim) -> bool:
        if own.is_live():
            return False
        log.error(
            "stage %s of run %s was claimed again; epoch %d ends here", own.stage, own.run_id, own.epoch
        )
        on_loss()
        return True

    with looking(claim, every_s, look, name=f"watch-{claim.stage}"):
        yield


@contextmanager
def looking(claim: Claim, every_s: float, look: Callable[[Claim], bool], *, name: str) -> Iterator[None]:
    """For the length of the block, call `look` every `every_s`, until it returns true.

    It is called in a thread of its own, with a copy of `claim` that has its own connection. While the ledger does not
    answer there is nothing to see: it is asked again.
    """
    own = claim.in_thread()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            with suppress(Unavailable, psycopg.Error):
                if look(own):
                    return

    thread = threading.Thread(target=watch, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        own.ledger.close()
