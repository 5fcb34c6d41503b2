"""What is wrong with a spec is said before a run exists, all at once, by field."""

import pytest

from tasks.errors import InputError
from tasks.preflight import check_spec
from tasks.spec.pool import parse_pool


def test_all_problems_are_said_at_once_and_name_their_fields(spec, settings, tmp_path):
    wrong = spec(
        batch={"prompt": "text", "output": str(tmp_path / "prompts.jsonl"), "sampling": {"max_tokens": 4096}},
        serving={"max_model_len": 4096, "extra_args": {"max_lora": 2}},
        convert={"calibration": str(tmp_path / "nothing.txt")},
    )
    with pytest.raises(InputError) as refused:
        check_spec(wrong, settings)
    first, *problems = str(refused.value).splitlines()
    assert first == "5 problems found before anything was started:"
    assert [problem.strip().split(":")[0] for problem in problems] == [
        "serving.extra_args.max_lora",
        "batch.sampling.max_tokens",
        "batch.prompt",
        "batch.output",
        "convert.calibration",
    ]
    assert "'text'" in problems[2]
    assert "id, prompt" in problems[2]


def test_a_good_spec_is_not_refused(spec, settings):
    check_spec(spec(), settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "/nowhere/at/all"}, r"batch\.input: there is no file or folder /nowhere/at/all"),
        ({"id": "key"}, r"batch\.id: there is no column 'key'.*id, prompt"),
        ({"prompt": None, "messages": "chat"}, r"batch\.messages: there is no column 'chat'.*id, prompt"),
    ],
)
def test_input_that_is_missing_is_refused(spec, settings, change, message):
    with pytest.raises(InputError, match=message):
        check_spec(spec(batch=change), settings)


def test_a_path_with_an_open_date_is_left_for_later(spec, settings):
    check_spec(spec(batch={"input": "/nowhere/{{ ds }}", "output": "/dev/null/{{ ds }}"}), settings)


def test_a_deadline_of_the_past_is_refused_when_a_run_starts_and_at_no_later_time(spec, settings, preflight):
    for past in ("2026-01-01T07:00+01:00", "2026-01-01T07:00Z"):
        with pytest.raises(InputError, match=r"limits\.deadline: 2026-01-01T07:00.* is over"):
            check_spec(spec(limits={"deadline": past}), settings)
    pool = {"model": {"repo": "owner/name"}, "layout": {"cpu": 1}}
    with pytest.raises(InputError, match=r"  until: 2026-01-01T07:00Z is over"):
        check_spec(parse_pool({**pool, "until": "2026-01-01T07:00Z"}), settings)
    for ahead in ("2999-01-01T07:00+01:00", "07:00", "6h"):
        check_spec(spec(limits={"deadline": ahead}), settings)
    preflight(spec(limits={"deadline": "2026-01-01T07:00Z"}))
