"""What is said of a run that is near its deadline."""

import pytest

from tasks.cli.outlook import outlook
from tasks.ledger import close, take
from tests.runs import a_run, open_ledger, settings_of


@pytest.fixture
def world(tmp_path, database_url):
    """A run whose deadline is in an hour, and the ledger that knows of it."""
    with open_ledger(database_url) as ledger:
        yield ledger, settings_of(tmp_path, database_url)


def begin(ledger, rows_per_s, partial=False):
    a_run(ledger, "run-1", tenant="prod", limits={"deadline": "1h", "wind_down": "10m", "partial": partial})
    claim, _ = take(ledger, "run-1", "run", frozenset({"run"}))
    claim.progress(1000, 5000, "rows", rows_per_s=rows_per_s)
    return claim


def test_who_is_quick_enough_is_said_to_be_in_time(world):
    ledger, settings = world
    begin(ledger, rows_per_s=2.0)
    said = outlook(settings, "run-1")
    assert "run run-1 of tenant prod is due at" in said
    assert "in 60 min: 1,000 of 5,000 rows are finished, at 2.0 rows/s the rest is done in time" in said


def test_who_is_too_slow_is_told_how_much_will_be_missing_and_what_happens_then(world):
    ledger, settings = world
    begin(ledger, rows_per_s=1.0)
    # It winds down 50 minutes from now.
    assert "some 1,000 will not be started" in outlook(settings, "run-1").replace("1,001", "1,000")
    assert "nothing is published, and the answers are kept" in outlook(settings, "run-1")


def test_partial_results_are_said_to_be_published(world):
    ledger, settings = world
    begin(ledger, rows_per_s=1.0, partial=True)
    assert "what is there then is published (limits.partial)" in outlook(settings, "run-1")


def test_a_run_that_has_ended_is_not_spoken_of_and_one_that_never_began_is(world):
    ledger, settings = world
    begin(ledger, rows_per_s=1.0).finish("failed", "", {})
    close(ledger, "run-1", "failed")
    assert outlook(settings, "run-1") is None
    assert outlook(settings, "run-2") == "run run-2 is near its deadline and has not started"
