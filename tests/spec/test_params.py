"""The form's Params, the YAML reader and the reference page are one schema."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tasks.errors import InputError
from tasks.spec import parse
from tasks.spec.params import fields, json_schema
from tasks.spec.reference import render

REPOSITORY = Path(__file__).resolve().parents[2]

PARTS = {
    "version": st.sampled_from([1, 2, "1", None]),
    "tenant": st.sampled_from(["prod", "", "two words", 7]),
    "model": st.sampled_from([{"repo": "Qwen/Q"}, {"repo": ""}, {}, {"repo": "Qwen/Q", "branch": "x"}]),
    "convert": st.sampled_from(
        [{}, {"scheme": "awq"}, {"scheme": "int3"}, {"group_size": 48}, {"group_size": 64}]
    ),
    "node": st.sampled_from(["dgx-01", "-", ["a"]]),
    "layout": st.sampled_from(
        [
            {"cpu": 2},
            {"cpu": 0},
            {"mig": {"1g.10gb": 7}},
            {"mig": {}},
            {"tensor_parallel": 4, "gpus": [0, 1]},
            {},
        ]
    ),
    "serving": st.sampled_from(
        [{}, {"max_num_seqs": 0}, {"gpu_memory_utilization": 1.5}, {"extra_args": {"a": []}}]
    ),
    "batch": st.sampled_from(
        [
            {"input": "i", "output": "o", "prompt": "p"},
            {"input": "i", "output": "o", "messages": "m"},
            {"input": "i", "output": "o", "prompt": "p", "messages": "m"},
            {"input": "i", "output": "o"},
            {"input": "i", "output": "o", "prompt": "p", "sampling": {"max_tokens": -5}},
            {"input": "i", "output": "o", "prompt": "p", "schema": {"type": "object"}},
        ]
    ),
    "limits": st.sampled_from([{}, {"deadline": "6h"}, {"deadline": "six"}, {"max_row_error_rate": 2}]),
}
"""For each field, values of which some are right and some are wrong."""


DOCUMENT = Draft202012Validator(json_schema())
PARAMS = {name: Draft202012Validator(schema) for name, (_, schema) in fields().items()}


def reader_accepts(document):
    try:
        parse(document)
    except InputError:
        return False
    return True


@given(st.fixed_dictionaries({}, optional=PARTS))
def test_the_schema_accepts_just_what_the_reader_accepts(document):
    assert DOCUMENT.is_valid(document) == reader_accepts(document)


@given(st.fixed_dictionaries(PARTS))
def test_the_params_one_by_one_accept_just_what_the_reader_accepts(document):
    by_params = all(validator.is_valid(document[name]) for name, validator in PARAMS.items())
    assert by_params == reader_accepts(document)


def test_the_form_covers_every_field_with_a_value_that_it_accepts():
    first_values = {name: value for name, (value, _) in fields().items()}
    assert set(first_values) == set(json_schema()["properties"])
    assert [name for name, value in first_values.items() if not PARAMS[name].is_valid(value)] == []
    parse(first_values)


def test_the_reference_page_is_up_to_date():
    assert (REPOSITORY / "docs/run-spec.md").read_text() == render(), (
        "write it anew: .venv/bin/python -m tasks.spec.reference > docs/run-spec.md"
    )


def test_the_example_on_the_reference_page_is_a_spec():
    example = render().split("```yaml\n")[1].split("```")[0]
    assert parse(yaml.safe_load(example)).model.repo == "Qwen/Qwen3.5-9B"


@pytest.mark.parametrize("name", list(fields()))
def test_no_param_refers_to_a_definition_that_airflow_cannot_see(name):
    assert "$ref" not in str(fields()[name][1])
