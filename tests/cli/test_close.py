"""The end of a run that was made by hand."""

import pytest

from tasks.cli.close import close
from tasks.errors import InputError
from tasks.ledger import load, take
from tests.runs import a_run, open_ledger, settings_of


@pytest.mark.parametrize(
    ("outcome", "verdict", "said"),
    [
        ("nothing to do", "done", "run-1 is closed as done"),
        ("done", "done", "run-1 is closed as done"),
        ("failed", "failed", "run-1 is closed as failed: publish did not succeed"),
        (None, "failed", "run-1 is closed as failed: publish did not succeed"),
    ],
)
def test_a_run_ends_as_its_stages_did(tmp_path, database_url, outcome, verdict, said):
    with open_ledger(database_url) as ledger:
        a_run(ledger, "run-1")
        take(ledger, "run-1", "run", frozenset({"run"}))[0].finish("done", "", {})
        claim, _ = take(ledger, "run-1", "publish", frozenset({"publish"}))
        if outcome is not None:
            claim.finish(outcome, "", {})
        document, text = close(settings_of(tmp_path, database_url), "run-1")
        assert load(ledger, "run-1").verdict == document["verdict"] == verdict
    assert text == said


def test_a_run_that_does_not_exist_cannot_be_closed(tmp_path, database_url):
    with pytest.raises(InputError, match="run-2"):
        close(settings_of(tmp_path, database_url), "run-2")


def test_a_run_that_published_a_part_of_its_rows_is_partial(tmp_path, database_url):
    with open_ledger(database_url) as ledger:
        a_run(ledger, "run-1")
        take(ledger, "run-1", "reconcile", frozenset({"reconcile"}))[0].finish("done", "", {"not_started": 3})
        assert close(settings_of(tmp_path, database_url), "run-1")[0]["verdict"] == "partial"


def test_a_keeper_that_was_ended_by_its_successor_is_no_failure(tmp_path, database_url):
    with open_ledger(database_url) as ledger:
        a_run(ledger, "run-1")
        take(ledger, "run-1", "keeper", frozenset({"keeper"}))
        take(ledger, "run-1", "stop", frozenset({"stop", "keeper"}))[0].finish("done", "", {})
        assert close(settings_of(tmp_path, database_url), "run-1")[0]["verdict"] == "done"
