"""Dates in a spec are resolved once."""

from datetime import UTC, datetime

import pytest

from tasks.errors import InputError
from tasks.spec import parse
from tasks.spec.freeze import resolve_dates

AT = datetime(2026, 3, 9, 1, 2, 3, tzinfo=UTC)


def spec(path):
    return parse(
        {
            "model": {"repo": "Qwen/Q"},
            "layout": {"cpu": 1},
            "batch": {"input": path, "output": "/out/{{ds_nodash}}", "prompt": "p"},
        }
    )


def test_dates_are_written_out_wherever_they_stand():
    resolved = resolve_dates(spec("/in/{{ ds }}/{{ year }}-{{month}}"), AT)
    assert resolved.batch.input == "/in/2026-03-09/2026-03"
    assert resolved.batch.output == "/out/20260309"


def test_what_has_no_date_stays_as_it_is():
    plain = spec("/in/{ds}")
    assert resolve_dates(plain, AT).batch.input == "/in/{ds}"


def test_an_unknown_placeholder_is_refused_with_its_field_and_those_there_are():
    with pytest.raises(InputError, match=r"batch\.input: \{\{ dss \}\} is not known.*ds_nodash"):
        resolve_dates(spec("/in/{{ dss }}"), AT)
