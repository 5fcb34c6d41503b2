"""Dates in a spec are resolved once."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from tasks.errors import InputError
from tasks.spec import parse, times
from tasks.spec.freeze import resolve_dates, resolve_deadline

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


@pytest.mark.parametrize(
    ("now", "deadline"),
    [
        ("2026-03-09T06:59:00", "2026-03-09T07:00:00+01:00"),
        ("2026-03-09T07:00:00", "2026-03-10T07:00:00+01:00"),
        # That night is an hour shorter.
        ("2026-03-28T23:00:00", "2026-03-29T07:00:00+02:00"),
    ],
)
def test_a_deadline_on_the_wall_is_the_next_time_that_the_clock_shows_it(now, deadline):
    wall = datetime.fromisoformat(now).replace(tzinfo=ZoneInfo("Europe/Berlin"))
    at_seven = parse({**spec("/in").model_dump(), "limits": {"deadline": "07:00"}})
    assert resolve_deadline(at_seven, wall).limits.deadline == deadline
    assert times.moment_of(deadline, AT) == datetime.fromisoformat(deadline)


def test_a_deadline_that_is_a_duration_stays_one():
    assert resolve_deadline(spec("/in"), AT).limits.deadline == "6h"
    assert times.moment_of("90m", AT) == datetime(2026, 3, 9, 2, 32, 3, tzinfo=UTC)


def test_a_date_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match=r"limits\.deadline: there is no such date"):
        parse({**spec("/in").model_dump(), "limits": {"deadline": "2026-02-30T07:00Z"}})
