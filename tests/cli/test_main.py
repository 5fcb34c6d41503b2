"""The contract of the command line: exit statuses, one JSON object, no traceback for what a user can cause."""

import json
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tasks import settings as deployment
from tasks import stages
from tasks.cli import main
from tasks.cli.stage import name_of
from tasks.ledger import Ledger
from tasks.settings import REPOSITORY
from tasks.weights import pin
from tests.runs import a_spec


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A deployment without a ledger: bad input must be refused before one is asked."""
    monkeypatch.setenv("QWEN_PIPELINE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("QWEN_PIPELINE_LEDGER_URL", raising=False)
    monkeypatch.delenv("QWEN_PIPELINE_LEDGER_URL_FILE", raising=False)
    deployment.current.cache_clear()
    yield tmp_path
    deployment.current.cache_clear()


@pytest.fixture
def spec(home):
    """A spec that is right, as a document to be spoilt."""
    pq.write_table(pa.table({"row_id": ["a", "b"], "prompt": ["x", "y"]}), home / "prompts.parquet")
    return {
        "version": 1,
        "model": {"repo": "local/nothing"},
        "convert": {"scheme": "none"},
        "layout": {"cpu": 1},
        "serving": {"max_model_len": 256, "kv_cache_memory_mb": 64},
        "batch": {
            "input": str(home / "prompts.parquet"),
            "output": str(home / "answers"),
            "prompt": "prompt",
            "sampling": {"max_tokens": 8},
        },
    }


def write(home, document):
    path = home / "spec.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def unknown_field(document):
    document["bacth"] = document["batch"]


def negative_tokens(document):
    document["batch"]["sampling"]["max_tokens"] = -1


def missing_input(document):
    document["batch"]["input"] += ".gone"


def missing_column(document):
    document["batch"]["prompt"] = "question"


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (unknown_field, "bacth"),
        (negative_tokens, "batch.sampling.max_tokens"),
        (missing_input, "batch.input"),
        (missing_column, "batch.prompt"),
    ],
)
def test_a_bad_spec_ends_with_2_and_names_the_field_before_anything_starts(home, spec, spoil, field, capsys):
    spoil(spec)
    before = set(home.rglob("*"))
    assert main(["preflight", "--spec", write(home, spec), "--json"]) == 2
    said = capsys.readouterr()
    refusal = json.loads(said.out)
    assert field in refusal["message"]
    assert refusal["remedy"] == "user"
    assert field in said.err
    assert "Traceback" not in said.err
    assert set(home.rglob("*")) - before == {home / "spec.yaml"}


def test_a_date_that_does_not_exist_is_bad_input(home, spec, capsys):
    path = home / "spec.yaml"
    path.write_text(f"{yaml.safe_dump(spec)}limits: {{deadline: 2026-02-30}}\n")
    assert main(["preflight", "--spec", str(path)]) == 2
    assert "is not YAML: day is out of range" in capsys.readouterr().err


def test_without_a_ledger_a_good_spec_is_told_what_to_set(home, spec, capsys):
    assert main(["preflight", "--spec", write(home, spec)]) == 2
    assert "QWEN_PIPELINE_LEDGER_URL_FILE" in capsys.readouterr().err


def test_a_stage_needs_a_spec_or_a_run(home, capsys):
    assert main(["start"]) == 2
    assert "--spec FILE, or --run NAME" in capsys.readouterr().err


def test_a_wrong_setting_is_named(home, monkeypatch, capsys):
    monkeypatch.setenv("QWEN_PIPELINE_LEASE_S", "soon")
    assert main(["status"]) == 2
    assert "QWEN_PIPELINE_LEASE_S" in capsys.readouterr().err


def test_a_list_that_is_no_json_is_named(home, monkeypatch, capsys):
    monkeypatch.setenv("QWEN_PIPELINE_NODES", "dgx-01")
    assert main(["status"]) == 2
    assert "QWEN_PIPELINE_NODES: this is no JSON" in capsys.readouterr().err


def test_an_unknown_verb_ends_with_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["pulbish"])
    assert ended.value.code == 2
    assert "pulbish" in capsys.readouterr().err


def test_a_ledger_that_does_not_answer_ends_with_4_and_shows_no_password(home, monkeypatch, capsys):
    monkeypatch.setenv("QWEN_PIPELINE_LEDGER_URL", "postgresql://u:topsecret@127.0.0.1:1/none")
    monkeypatch.setattr(Ledger.__init__, "__defaults__", (0.1,))
    assert main(["status", "--json"]) == 4
    said = capsys.readouterr()
    assert json.loads(said.out)["remedy"] == "retry"
    assert "cannot be reached" in said.err
    assert "topsecret" not in said.out + said.err


def test_status_of_an_empty_ledger_says_so(home, database_url, monkeypatch, capsys):
    monkeypatch.setenv("QWEN_PIPELINE_LEDGER_URL", database_url)
    assert main(["status"]) == 0
    assert "no run has been started yet" in capsys.readouterr().out
    assert main(["status", "--run", "nobody"]) == 2
    assert "there is no run 'nobody'" in capsys.readouterr().err


@pytest.fixture
def named(home, spec, database_url, monkeypatch, capsys):
    """The run that a command for a spec with dates means; what it does is of no interest."""
    monkeypatch.setenv("QWEN_PIPELINE_LEDGER_URL", database_url)
    monkeypatch.setattr(pin, "pin", lambda spec, settings: {"commit": "c"})
    monkeypatch.setattr(
        stages, "execute", lambda verb, run, settings: stages.Result(verb, run, 1, False, "", {}, 0.0)
    )
    spec["batch"]["output"] += "/{{ ds }}"
    path = write(home, spec)

    def named(*options):
        status = main(["preflight", "--spec", path, "--json", *options])
        said = json.loads(capsys.readouterr().out)
        return (status, said.get("run") or said["message"])

    return named


def test_one_spec_is_another_run_on_another_day(named):
    first = named("--date", "2026-05-30")
    assert named("--date", "2026-05-30T23:00") == first
    assert named("--date", "2026-05-31")[0] == 0
    assert named("--date", "2026-05-31") != first


def test_a_spec_with_dates_is_no_run_until_somebody_says_of_which_day(named):
    status, said = named()
    assert status == 2
    assert "say which day with --date 2026-05-31" in said


def test_a_run_that_is_named_keeps_the_day_on_which_it_started(named):
    assert named("--run", "mine", "--date", "2026-05-30") == (0, "mine")
    assert named("--run", "mine") == (0, "mine")
    status, said = named("--run", "mine", "--date", "2026-05-31")
    assert status == 2
    assert "run 'mine' was started for another date" in said


def test_a_runs_name_is_made_of_what_its_spec_says_so_that_no_new_default_makes_another_run_of_it():
    said = (
        '{"model":{"repo":"owner/name"},"layout":{"cpu":1},'
        '"batch":{"input":"/prompts","output":"/answers","id":"id","prompt":"prompt"}}'
    )
    assert name_of(a_spec(), None) == f"cli-{sha256(said.encode()).hexdigest()[:8]}"


def test_a_second_migrate_has_nothing_to_do(home, empty_database_url, monkeypatch, capsys):
    monkeypatch.setenv("QWEN_PIPELINE_LEDGER_URL", empty_database_url)
    assert main(["migrate", "--json"]) == 0
    migrations = sorted(path.stem for path in (REPOSITORY / "sql" / "migrations").glob("*.sql"))
    assert json.loads(capsys.readouterr().out)["applied"] == migrations
    assert main(["migrate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"applied": []}
