"""The DAG of a release alone."""

import pytest

from tasks.errors import InputError
from tasks.spec.params import fields
from tasks.spec.release import ReleaseSpec, parse_release


@pytest.fixture
def described(read_by_airflow):
    return read_by_airflow["dags"]["qwen_release"]


def test_it_does_the_weights_alone(described):
    assert set(described["tasks"]) == {"freeze", "download", "convert", "announce", "judge"}
    assert described["tasks"]["convert"]["upstream"] == ["download"]


def test_the_release_is_announced_as_an_asset_only_after_it_was_made(described):
    announce = described["tasks"]["announce"]
    assert announce["outlets"] == ["qwen_release"]
    assert announce["upstream"] == ["convert"]


def test_a_failed_run_stays_failed(described):
    judge = described["tasks"]["judge"]
    assert judge["teardown"]
    assert "announce" in judge["upstream"]
    assert described["told_of_failure"] == ["close_what_failed", "SmtpNotifier"]


def test_the_form_asks_for_the_weights_and_nothing_else(described):
    assert described["params"] == {name: value for name, (value, _) in fields(ReleaseSpec).items()}
    assert set(described["params"]) == {"version", "tenant", "model", "convert", "node"}


def test_its_spec_is_refused_like_a_run_spec():
    spec = parse_release({"model": {"repo": "Qwen/Q"}, "convert": {"scheme": "fp8"}})
    assert (spec.model.repo, spec.convert.scheme) == ("Qwen/Q", "fp8")
    with pytest.raises(InputError, match=r"\n  convert\.scheem"):
        parse_release({"model": {"repo": "Qwen/Q"}, "convert": {"scheem": "fp8"}})
    with pytest.raises(InputError, match=r"is not the spec of a release:\n  serving: there is no such field"):
        parse_release({"model": {"repo": "Qwen/Q"}, "serving": {"max_model_len": 512}})
