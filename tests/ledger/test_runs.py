"""The end of a run that nobody goes on with."""

from datetime import datetime

import pytest

from tasks.ledger import Ledger, close, load, take
from tasks.ledger.runs import close_given_up
from tests.runs import a_run


@pytest.fixture
def run(ledger: Ledger) -> str:
    """One that has begun a stage, which was killed."""
    a_run(ledger, "run-1")
    take(ledger, "run-1", "run", frozenset({"run"}))
    return "run-1"


def now(ledger: Ledger) -> datetime:
    with ledger.transaction() as connection:
        row = connection.execute("select clock_timestamp() as now").fetchone()
    assert row is not None
    moment: datetime = row["now"]
    return moment


def test_a_run_that_was_given_up_is_closed_as_failed(ledger: Ledger, run: str) -> None:
    failed_at = now(ledger)
    take(ledger, run, "reap", frozenset({"reap", "keeper"}))
    assert close_given_up(ledger, run, failed_at)
    assert load(ledger, run).verdict == "failed"


def test_a_task_that_lives_on_keeps_no_run_open_that_was_given_up(ledger: Ledger, run: str) -> None:
    failed_at = now(ledger)
    take(ledger, run, "keeper", frozenset({"keeper"}))
    assert close_given_up(ledger, run, failed_at)
    take(ledger, run, "keeper", frozenset({"keeper"}))
    assert load(ledger, run).verdict == "failed"


def test_a_run_that_was_started_again_since_stays_open(ledger: Ledger, run: str) -> None:
    failed_at = now(ledger)
    take(ledger, run, "preflight", frozenset({"preflight"}))
    assert not close_given_up(ledger, run, failed_at)
    assert load(ledger, run).verdict is None


def test_a_verdict_is_kept(ledger: Ledger, run: str) -> None:
    close(ledger, run, "done")
    assert not close_given_up(ledger, run, now(ledger))
    assert load(ledger, run).verdict == "done"


def test_a_run_that_never_began_is_no_matter(ledger: Ledger) -> None:
    assert not close_given_up(ledger, "run-2", now(ledger))
