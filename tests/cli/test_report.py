"""What a run did, for the command line and for the page that its tasks link to."""

import yaml

from tasks.cli.report import report
from tasks.ledger import take
from tests.runs import a_run, open_ledger, settings_of


def test_the_report_has_rows_time_the_frozen_spec_and_when_it_is_due(tmp_path, database_url):
    with open_ledger(database_url) as ledger:
        run = a_run(ledger, "run-1", tenant="prod", limits={"deadline": "2026-03-09T07:00:00+01:00"})
        for stage, facts in (
            ("prepare", {"batch_id": "b-1", "rows": 60}),
            ("run", {"answered": 59, "failed": 1, "not_started": 0}),
            ("publish", {"output": "/answers"}),
        ):
            claim, _ = take(ledger, "run-1", stage, frozenset({stage}))
            claim.finish("done", "", facts)
    found, text = report(settings_of(tmp_path, database_url), "run-1")
    assert (found["rows"], found["answered"], found["failed"], found["batch"]) == (60, 59, 1, "b-1")
    assert found["output"] == "/answers"
    assert found["deadline"] == "2026-03-09 06:00 UTC"
    assert list(found["seconds"]) == ["prepare", "run", "publish"]
    assert yaml.safe_load(found["spec"]) == run.spec.model_dump(mode="json")
    assert "answered           59" in text
    assert "tenant" not in text, "the spec is for the page"
