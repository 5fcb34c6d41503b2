"""Submitting a Spark application as a child process: for the command line, and for tests.

The builder of the submission is `tasks.batch.submission`; Airflow's operator gets the same one.
"""

import logging
import os
import re
import signal
from pathlib import Path

from tasks import errors
from tasks.batch.spark_driver import FAILURE, lost_a_process
from tasks.errors import StageFailed, Unavailable
from tasks.node import processes
from tasks.spark import SparkSubmission

log = logging.getLogger(__name__)

_KILLED = re.compile(r"(?:status|code)(?: is)?:? (?:-9|-15|137|143)\b")
"""SIGKILL, which is the kernel's when memory is short, and SIGTERM: of spark-submit, or 128 more of what it waited for.
In the words of `_failure`, of Airflow's provider and of YARN."""

_SHOWN_LINES = 8
_READ_BYTES = 64 * 1024


def submit_child(submission: SparkSubmission) -> None:
    """Run spark-submit as a child that dies with this thread; returns when the application has ended.

    Raises:
        StageFailed: it failed; the message holds the lines of its log that matter.
        Unavailable: the engines did not answer, or a process of the application was killed; a later try can help.
    """
    conf = [word for name, value in submission.conf.items() for word in ("--conf", f"{name}={value}")]
    command: list[str | os.PathLike[str]] = [
        submission.binary,
        "--name",
        submission.name,
        *conf,
        submission.application,
    ]
    submission.log.parent.mkdir(parents=True, exist_ok=True)
    before = submission.log.stat().st_size if submission.log.exists() else 0
    child = processes.spawn(
        [*command, *submission.arguments],
        submission.environment,
        submission.log,
        cwd=submission.log.parent,
    )
    try:
        status = child.wait()
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if status != 0:
        raise _failure(status, submission.log, before)


def failure(lines: list[str], otherwise: str) -> errors.StageError:
    """The typed error that the driver told of in its output; with `otherwise` where it told of none, because it was
    killed (`Unavailable`) or is broken (`StageFailed`)."""
    told = [line.partition(FAILURE)[2] for line in lines if FAILURE in line]
    if told:
        name, _, message = told[-1].partition(": ")
        return errors.of_name(name, message)
    is_killed = _KILLED.search(otherwise) is not None or any(map(lost_a_process, lines))
    return Unavailable(otherwise) if is_killed else StageFailed(otherwise)


def _failure(status: int, log_file: Path, start: int) -> errors.StageError:
    with log_file.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _READ_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    shown = [line for line in lines if line.strip() and not line.startswith(("\tat ", "  "))]
    last = "\n".join(shown[-_SHOWN_LINES:]) or "(it printed nothing)"
    otherwise = f"the Spark application ended with status {status}; the end of its log {log_file}:\n{last}"
    return failure(lines, otherwise)
