"""What is wrong with a spec is said before a run exists, all at once, by field."""

import pytest

from tasks.errors import InputError
from tasks.preflight import check_spec


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
