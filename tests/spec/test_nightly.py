"""Scheduled runs in files: read, refused by name, and never in each other's way."""

import pytest

from tasks.errors import InputError
from tasks.spec.nightly import Nightly, Refused, read_folder, read_nightly

GOOD = """
schedule: {cron: "30 0 * * *", timezone: Europe/Berlin}
spec:
  tenant: prod
  model: {repo: owner/name}
  layout: {cpu: 1}
  batch: {input: "/prompts/{{ ds }}/", output: /answers, prompt: prompt}
"""


def test_a_file_is_a_schedule_and_a_run_spec_under_the_files_name(tmp_path):
    (tmp_path / "prod.yaml").write_text(GOOD)
    (found,) = read_folder(tmp_path)
    assert isinstance(found, Nightly)
    assert (found.name, found.schedule.timezone, found.schedule.catchup) == ("prod", "Europe/Berlin", False)
    assert found.spec.batch.input == "/prompts/{{ ds }}/"


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("Europe/Berlin", "Europe/Berlinn", r"schedule\.timezone: no such time zone"),
        ("30 0 * * *", "at night", r"schedule\.cron"),
        ("schedule:", "sched:", "two fields, `schedule` and `spec`"),
        ("timezone:", "zone:", r"schedule\.zone"),
        ("tenant:", "tennant:", "tennant: there is no such field"),
        ("layout: {cpu: 1}", "layout: {cpu: 0}", "layout.cpu"),
        ("spec:", "spec: [", "not YAML"),
        # What PyYAML itself does not see coming.
        ("tenant: prod", "tenant: 2026-02-30", "not YAML: day is out of range"),
        ("tenant: prod", "tenant: !!bool maybe", "not YAML"),
        ("Europe/Berlin}", "UTC, catchup: true}", "schedule: `catchup: true` needs `start`, the first day"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, before, after, named):
    path = tmp_path / "prod.yaml"
    path.write_text(GOOD.replace(before, after, 1))
    with pytest.raises(InputError, match=named):
        read_nightly(path)


def test_a_wrong_file_does_not_take_the_others_with_it(tmp_path):
    (tmp_path / "a.yaml").write_text("nothing of the kind")
    (tmp_path / "b.yaml").write_text(GOOD)
    (tmp_path / "of tenant 3.yaml").write_bytes(b"\xff\xfe")
    found = {one.name: type(one) for one in read_folder(tmp_path)}
    assert found == {"a": Refused, "b": Nightly, "of_tenant_3": Refused}


def test_no_folder_is_no_nightly_run(tmp_path):
    assert read_folder(tmp_path / "absent") == []


def test_files_that_would_be_one_dag_are_told_apart_and_the_first_keeps_its_name(tmp_path):
    for name in ("team a.yaml", "team_a.yaml", "team_a.yml"):
        (tmp_path / name).write_text(GOOD)
    kept, *others = read_folder(tmp_path)
    assert (type(kept), kept.name) == (Nightly, "team_a")
    assert [type(one) for one in others] == [Refused, Refused]
    assert len({one.name for one in (kept, *others)}) == 3
    for one, file in zip(others, ("team_a.yml", "team a.yaml"), strict=True):
        assert f"{tmp_path / file} and {tmp_path / 'team_a.yaml'} would be one DAG" in one.reason


def test_yml_is_read_too(tmp_path):
    (tmp_path / "prod.yml").write_text(GOOD)
    assert [one.name for one in read_folder(tmp_path)] == ["prod"]


def test_a_name_that_no_dag_can_have_is_made_into_one(tmp_path):
    (tmp_path / "a..b.yaml").write_text(GOOD)
    (tmp_path / f"{'x' * 240}.yaml").write_text(GOOD)
    dotted, long = read_folder(tmp_path)
    assert (type(dotted), dotted.name) == (Nightly, "a_.b")
    assert isinstance(long, Refused)
    assert len(long.name) < 120
    assert "longer than 100 characters" in long.reason
