"""How runs end: what Airflow's scheduler decides about them, and what the last task says."""

import json
import subprocess

import pytest

from tasks.ledger import load, take
from tests.dags.conftest import command, environment_of
from tests.runs import a_run, open_ledger

DAGS = ("qwen_batch", "qwen_pool", "qwen_release")


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    """See tests/dags/decide.py."""
    environment = environment_of(tmp_path_factory.mktemp("deciding"))
    said = subprocess.run(command("decide.py"), env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout.splitlines()[-1])


@pytest.mark.parametrize("dag", DAGS)
@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("goes well", "success"),
        ("marked failed before it began", "failed"),
        ("does not start", "failed"),
        ("convert fails", "failed"),
    ],
)
def test_every_run_is_judged_and_a_failed_one_is_failed(decided, dag, how, ends):
    assert decided[dag][how]["ends"] == ends
    assert decided[dag][how]["ran"][-1] == "judge"


@pytest.mark.parametrize("dag", ["qwen_batch", "qwen_pool"])
def test_what_a_run_may_have_is_given_back_whatever_failed(decided, dag):
    assert decided[dag]["convert fails"]["ran"][-3:] == ["stop", "restore", "judge"]


def test_a_run_whose_file_is_spoilt_meanwhile_ends_as_any_other(decided):
    spoilt = decided["qwen_nightly_prod"]["its file is spoilt"]
    assert spoilt["ends"] == "success"
    assert set(spoilt["ran"]) == set(decided["qwen_batch"]["goes well"]["ran"])


def test_the_last_task_closes_a_run_as_done_or_as_partial(act, database_url):
    states = {"publish": "success", "judge": "running"}
    with open_ledger(database_url) as ledger:
        a_run(ledger, "run-1")
        claim, _ = take(ledger, "run-1", "reconcile", frozenset({"reconcile"}))
        assert act("qwen_batch", "judge", states=states)["returned"] == "done"
        claim.finish("nothing to do", "", {"not_started": 3})
        assert act("qwen_batch", "judge", states=states)["returned"] == "partial"
        assert load(ledger, "run-1").verdict == "partial"


def test_the_last_task_fails_a_run_of_which_the_ledger_knows_nothing(act):
    came = act("qwen_batch", "judge", states={"freeze": "skipped", "download": "skipped"})
    assert (came["raised"], came["message"][:14]) == ("AirflowFailException", "the run failed")


def test_a_ledger_that_is_away_lets_the_last_task_be_tried_again(act):
    came = act("qwen_batch", "judge", states={"publish": "success"}, ledger="postgresql://u@127.0.0.1:1/none")
    assert came["raised"] == "AirflowException"
    assert "[a retry can help]" in came["message"]


def test_what_ends_a_run_is_tried_as_often_as_its_stages(read_by_airflow):
    for dag, task in (("qwen_batch", "judge"), ("qwen_pool", "judge"), ("qwen_release", "announce")):
        tasks = read_by_airflow["dags"][dag]["tasks"]
        assert tasks[task]["retries"] == tasks["convert"]["retries"] > 0
