"""Spark's driver for a stage of the batch: what such applications have in common.

It acts under the claim of its stage, whose run id and epoch it is given. It ends within seconds when that claim
has ended, and when Spark's own process above it is gone.
"""

import argparse
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module

from tasks import errors
from tasks import settings as deployment
from tasks.errors import StageError, StageFailed, Unavailable
from tasks.ledger import Claim, Ledger, Run, load
from tasks.watch import watching

log = logging.getLogger(__name__)

FAILURE = "qwen-pipeline failure: "
"""Begins the line that tells the stage, which reads the log, why the application failed."""

_DRIVERS = {"prepare": "tasks.batch.prepare_driver", "run": "tasks.batch.driver"}
"""What each stage's application does: `drive` there."""

_PARENT_WATCH_S = 0.5

_RAISED_IN_TASK = re.compile(r"^\s*tasks\.errors\.(\w+): (.+)$", re.MULTILINE)

_LOST = re.compile("Python worker exited unexpectedly|ExecutorLostFailure|Lost executor")


def parser() -> argparse.ArgumentParser:
    """Of what a stage submits (`submission.of`)."""
    made = argparse.ArgumentParser(description="Spark driver of a stage; started by spark-submit.")
    made.add_argument("--run", required=True)
    made.add_argument("--stage", required=True, choices=sorted(_DRIVERS))
    made.add_argument("--epoch", required=True, type=int)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the application; returns its exit status."""
    options = parser().parse_args(arguments)
    settings = deployment.current()
    logging.basicConfig(
        level=settings.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("py4j").setLevel(logging.WARNING)
    _end_with_parent()
    try:
        with Ledger(settings.database_url(), settings.sql) as ledger:
            claim = Claim(ledger, options.run, options.stage, options.epoch)
            with watching(claim, settings.claim_watch_s):
                _drive(load(ledger, options.run), claim, settings)
    except StageError as error:
        print(f"{FAILURE}{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    return 0


def lost_a_process(report: str) -> bool:
    """Whether Spark says in `report` that a process of the application went away: a later try can help."""
    return _LOST.search(report) is not None


def _drive(run: Run, claim: Claim, settings: deployment.Settings) -> None:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        import_module(_DRIVERS[claim.stage]).drive(run, claim, settings)
    except (PySparkException, Py4JJavaError) as error:
        raise _understood(error) from error


def _understood(error: Exception) -> StageError:
    """What a task raised, out of Spark's report of it."""
    raised = _RAISED_IN_TASK.findall(str(error))
    if raised:
        return errors.of_name(*raised[-1])
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    log.error("Spark failed", exc_info=error)
    if lost_a_process(str(error)):
        return Unavailable(
            f"a process of Spark's was killed or lost: {first}; what is finished is kept, try again"
        )
    return StageFailed(f"Spark failed: {first}; its log has the whole story")


def _end_with_parent() -> None:
    """End when Spark's process is gone: nothing here can go on then, and a successor must not meet us."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_WATCH_S)
        os._exit(StageFailed.exit_status)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
