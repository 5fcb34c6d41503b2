"""A stage that acts until it is told to stop, and leaves a trace of every act. Stands in for a real one."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.contract import Context, Outcome
from tasks.errors import StageError


@dataclass(frozen=True)
class Plan:
    """Whether anything is to be done."""

    satisfied: bool
    reason: str


def plan(context: Context) -> Plan:
    """Satisfied once the file `done` is there."""
    done = (context.settings.home / "done").exists()
    return Plan(done, "the file is there" if done else "make the file")


def apply(plan: Plan, context: Context) -> None:
    """Act until the file `enough` is there: in a file of this process, and in the ledger if it is told to."""
    home = context.settings.home
    trace = home / f"acts-{os.getpid()}"
    number = 0
    while not (home / "enough").exists():
        number += 1
        if os.environ["ACTS_IN_LEDGER"] == "yes":
            try:
                context.claim.progress(number, number, "acts")
            except StageError as error:
                (home / f"refused-{os.getpid()}").write_text(type(error).__name__)
                raise
        trace.write_text(str(number))
        time.sleep(0.01)
    Path(home / "done").touch()


def verify(context: Context) -> Outcome:
    """Who did it."""
    return Outcome("acted", {"epoch": context.claim.epoch})
