"""The form's Params, the YAML reader and the reference page are one schema."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from tasks.errors import InputError
from tasks.spec import RunSpec, parse
from tasks.spec.params import fields, json_schema
from tasks.spec.pool import PoolSpec
from tasks.spec.reference import render
from tasks.spec.release import ReleaseSpec

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
PARAMS = {name: validator_for(schema)(schema) for name, (_, schema) in fields().items()}


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


def test_the_form_differs_from_the_schema_in_words_for_people_alone():
    of_the_form = {"$schema", "title", "section", "description", "description_md", "default"}
    for name, schema in json_schema()["properties"].items():
        shown = {key: value for key, value in fields()[name][1].items() if key not in of_the_form}
        assert shown.pop("type", None) == schema.get("type", "object"), name
        assert shown == {key: value for key, value in schema.items() if key not in {*of_the_form, "type"}}, (
            name
        )


@pytest.mark.parametrize("spec", [RunSpec, ReleaseSpec, PoolSpec])
def test_every_field_of_a_form_has_its_section_and_a_help_that_names_each_part(spec):
    for name, (_, schema) in fields(spec).items():
        assert schema["section"], name
        assert schema["description_md"], name
        for part in schema.get("properties", {}):
            assert f"**{part}" in schema["description_md"], f"{name}.{part}"


def test_fields_of_a_section_stand_together():
    sections = [schema["section"] for _, schema in fields().values()]
    assert sections == sorted(sections, key=sections.index)
