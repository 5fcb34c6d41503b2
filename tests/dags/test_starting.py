"""How a run starts in the ledger, by the first task of its DAG; and that one that has started goes on."""

import json
from datetime import UTC, datetime

import pytest

from tasks.ledger import close, load
from tests.runs import a_run, a_spec, open_ledger


@pytest.fixture
def conf(tmp_path):
    """A conf of qwen_batch that is right."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"row_id": "a", "prompt": "x"}))
    return {
        "model": {"repo": "owner/name"},
        "node": "dgx-08",
        "layout": {"cpu": 1},
        "batch": {
            "input": str(tmp_path / "prompts.jsonl"),
            "output": str(tmp_path / "answers"),
            "prompt": "prompt",
        },
    }


def test_a_conf_that_names_what_has_no_default_starts_a_run(act, conf):
    came = act("qwen_batch", "freeze", conf=conf)
    assert came["returned"]["spec"]["batch"] == came["returned"]["spec"]["batch"] | conf["batch"]
    assert came["returned"]["spec"]["tenant"] == "default"


@pytest.mark.parametrize(
    ("dag", "task", "missing"),
    [
        ("qwen_batch", "freeze", ["model", "layout", "batch"]),
        ("qwen_pool", "freeze", ["model", "layout"]),
        ("qwen_release", "freeze", ["model"]),
    ],
)
def test_an_example_of_the_form_is_not_run_because_the_conf_leaves_it_out(act, conf, dag, task, missing):
    for name in missing:
        came = act(dag, task, conf={given: conf[given] for given in missing if given != name})
        assert came["raised"] == "AirflowFailException"
        assert f"does not name {name}: the form holds an example there" in came["message"]


def test_a_node_whose_queue_nobody_serves_is_refused(act, conf):
    came = act("qwen_batch", "freeze", conf={**conf, "node": "dgx-99"})
    assert "node: 'dgx-99' is none of this deployment's (dgx-07, dgx-08" in came["message"]


def test_a_nightly_dag_takes_what_the_conf_leaves_out_from_its_file(act, conf):
    came = act("qwen_nightly_prod", "freeze", conf={"batch": conf["batch"]})
    assert came["returned"]["spec"]["tenant"] == "prod"


def test_the_day_of_a_nightly_run_is_the_one_on_the_wall_of_its_schedule(act, conf, tmp_path):
    batch = {**conf["batch"], "output": str(tmp_path / "{{ ds }}")}
    came = act("qwen_nightly_prod", "freeze", conf={"batch": batch}, logical_date="2026-03-08T23:30:00+00:00")
    assert came["returned"]["spec"]["batch"]["output"] == str(tmp_path / "2026-03-09")


def test_the_day_of_a_run_by_hand_is_that_of_airflows_time_zone(act, conf, tmp_path):
    batch = {**conf["batch"], "output": str(tmp_path / "{{ ds }}")}
    came = act(
        "qwen_batch", "freeze", conf={**conf, "batch": batch}, logical_date="2026-03-08T22:30:00+00:00"
    )
    assert came["returned"]["spec"]["batch"]["output"] == str(tmp_path / "2026-03-09")  # in Helsinki


def test_a_refused_file_starts_no_run_and_says_why(act):
    came = act("qwen_nightly_never", "freeze")
    assert came["raised"] == "AirflowFailException"
    assert "schedule.cron: '99 0 * * *' is no cron expression" in came["message"]


@pytest.mark.parametrize("dag", ["qwen_nightly_prod", "qwen_nightly_never"])
def test_a_run_that_has_started_keeps_its_spec_though_its_file_is_another_or_wrong_now(
    act, database_url, dag
):
    with open_ledger(database_url) as ledger:
        run = a_run(ledger, f"{dag}.run-1", pins={"release_id": "r", "commit": "c"}, tenant="before")
        assert act(dag, "freeze")["returned"]["spec"] == run.spec.model_dump(mode="json")
        assert load(ledger, run.run_id).spec == run.spec


@pytest.mark.parametrize(
    ("dag", "deadline"), [("qwen_nightly_prod", "07:00"), ("qwen_batch", "6h"), ("qwen_pool", "8h")]
)
def test_a_run_that_is_cleared_after_its_deadline_has_time_again(act, conf, database_url, dag, deadline):
    name = "run-1" if dag == "qwen_batch" else f"{dag}.run-1"
    spec = a_spec(node="dgx-07", limits={"deadline": deadline})
    pins = {"release_id": "r", "commit": "c", "asked": spec.model_dump(mode="json")}
    with open_ledger(database_url) as ledger:
        a_run(ledger, name, pins=pins, node="dgx-07", limits={"deadline": "2026-03-09T07:00:00+01:00"})
        close(ledger, name, "failed")
        given = {part: conf[part] for part in ("model", "layout") if dag != "qwen_nightly_prod"}
        again = act(dag, "freeze", conf=given, cleared=1)["returned"]
        assert datetime.fromisoformat(again["deadline"]) > datetime.now(UTC)
        assert load(ledger, name).deadline == datetime.fromisoformat(again["deadline"])


def test_a_run_that_was_made_anew_under_an_ended_ones_id_is_refused_if_it_asks_for_something_else(
    act, conf, database_url
):
    def start(**more):
        return act("qwen_batch", "freeze", conf={**conf, "tenant": "now"}, **more)

    with open_ledger(database_url) as ledger:
        asked = a_spec(**conf, tenant="before")
        a_run(ledger, pins={"release_id": "r", "commit": "c"}, **conf, tenant="before")
        # Open: executed again after everything was killed, say.
        assert start()["returned"]["spec"]["tenant"] == "before"
        close(ledger, "run-1", "done")
        came = start()
        assert came["raised"] == "AirflowFailException"
        assert "started with another spec (today differs: tenant)" in came["message"]
        assert "start what is asked now under another run id" in came["message"]
        assert act("qwen_batch", "judge", states={"freeze": "failed"})["raised"] == "AirflowFailException"
        assert load(ledger, "run-1").verdict == "done"
        # Cleared, it is still that run; and asked for the same again, too.
        assert start(cleared=1)["returned"]["spec"] == asked.model_dump(mode="json")
        again = act("qwen_batch", "freeze", conf={**conf, "tenant": "before"})
        assert again["returned"]["spec"] == asked.model_dump(mode="json")


@pytest.mark.parametrize("other", ["qwen_pool", "qwen_release", "qwen_nightly_prod"])
def test_a_run_of_a_batch_takes_no_other_dags_run_for_its_own(act, conf, database_url, other):
    with open_ledger(database_url) as ledger:
        run = a_run(ledger, f"{other}.run-1", pins={"release_id": "r", "commit": "c"}, tenant="other")
        came = act("qwen_batch", "freeze", run=run.run_id, conf=conf)
        assert came["raised"] == "AirflowFailException"
        assert (
            f"dag_run_id: '{other}.run-1' begins as the ledger calls the runs of another DAG"
            in came["message"]
        )
        act("qwen_batch", "judge", run=run.run_id, states={"freeze": "failed"})
        assert load(ledger, run.run_id).verdict is None


def test_a_run_of_a_batch_may_be_called_after_the_model(act, conf):
    assert act("qwen_batch", "freeze", run="qwen_3.5.a", conf=conf)["returned"]["run"] == "qwen_3.5.a"


def test_a_run_that_has_started_goes_on_though_its_deadline_is_past(act, conf, database_url):
    limits = {"limits": {"deadline": "2026-01-01T07:00:00+01:00"}}
    came = act("qwen_batch", "freeze", conf={**conf, **limits})
    assert "limits.deadline: 2026-01-01T07:00:00+01:00 is over" in came["message"]
    with open_ledger(database_url) as ledger:
        a_run(ledger, pins={"release_id": "r", "commit": "c"}, **conf, **limits)
        assert act("qwen_batch", "freeze", conf={**conf, **limits})["returned"]["run"] == "run-1"
        close(ledger, "run-1", "failed")
        assert act("qwen_batch", "freeze", conf={**conf, **limits}, cleared=1)["returned"]["run"] == "run-1"
