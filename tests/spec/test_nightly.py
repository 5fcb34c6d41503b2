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
