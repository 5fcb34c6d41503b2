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
    """For the length of the block, call `on_loss` as soon as `claim` is seen to have ended."""

    def lost() -> None:
        log.error(
            "stage %s of run %s was claimed again; epoch %d ends here", claim.stage, claim.run_id, claim.epoch
        )
        on_loss()

    with calling(claim, every_s, lambda own: not own.is_live(), lost, name=f"watch-{claim.stage}"):
        yield


@contextmanager
def calling(
    claim: Claim, every_s: float, happened: Callable[[Claim], bool], act: Callable[[], None], *, name: str
) -> Iterator[None]:
    """For the length of the block, call `act` whenever `happened` is seen to be true.

    Both are called in a thread of its own; `happened` gets a copy of `claim` with its own connection. A ledger that
    does not answer says nothing: it is asked again after `every_s`.
    """
    own = claim.in_thread()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            try:
                has_happened = happened(own)
            except (Unavailable, psycopg.Error):
                continue
            if has_happened and not over.is_set():
                act()

    thread = threading.Thread(target=watch, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        own.ledger.close()
