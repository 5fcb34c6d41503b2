"""The run spec refuses what is wrong, and names it."""

import pytest

from tasks.errors import InputError
from tasks.spec import CpuLayout, MigLayout, parse, read

GOOD = {
    "model": {"repo": "Qwen/Qwen3.5-9B"},
    "layout": {"cpu": 2},
    "batch": {"input": "/in/{{ ds }}", "output": "/out", "prompt": "prompt"},
}


def changed(part, **fields):
    return {**GOOD, part: {**GOOD.get(part, {}), **fields}}


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({**GOOD, "modle": {}}, "modle"),
        (changed("model", repoo="x"), "model.repoo"),
        (changed("batch", sampling={"max_tokens": -1}), "batch.sampling.max_tokens"),
        (changed("batch", sampling={"temperature": 9}), "batch.sampling.temperature"),
        (changed("batch", messages="chat"), "batch: name exactly one of"),
        ({**GOOD, "batch": {"input": "/in", "output": "/out"}}, "batch: name exactly one of"),
        ({**GOOD, "layout": {"cpu": 0}}, "layout.cpu"),
        ({**GOOD, "layout": {"gpus": "all"}}, "layout: a layout is one of"),
        ({**GOOD, "layout": {"cpu": 1, "mig": {"1g.10gb": 1}}}, "layout"),
        ({**GOOD, "version": 2}, "version"),
        (changed("limits", deadline="soon"), "limits.deadline"),
        ({key: GOOD[key] for key in ("model", "layout")}, "batch: this field is required"),
    ],
)
def test_a_wrong_field_is_named(document, field):
    with pytest.raises(InputError) as refused:
        parse(document)
    assert f"\n  {field}" in str(refused.value)


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(InputError) as refused:
        parse({**changed("model", repoo="x"), "nodee": "a"})
    assert "model.repoo" in str(refused.value)
    assert "nodee" in str(refused.value)


def test_the_layout_is_what_its_field_says():
    assert parse(GOOD).layout == CpuLayout(cpu=2)
    cut = parse({**GOOD, "layout": {"mig": {"3g.40gb": 2}}})
    assert cut.layout == MigLayout(mig={"3g.40gb": 2}, gpus="all")


def test_a_spec_survives_its_own_document():
    spec = parse({**GOOD, "batch": {**GOOD["batch"], "schema": {"type": "object"}}})
    assert parse(spec.model_dump(mode="json")) == spec


def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(InputError, match=r"spec\.yaml holds list"):
        read(path)


def test_a_file_that_is_no_yaml_is_refused_by_name(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("model: [unclosed\n")
    with pytest.raises(InputError, match=r"spec\.yaml is not YAML"):
        read(path)


def test_a_file_that_is_missing_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.yaml cannot be read"):
        read(tmp_path / "nowhere.yaml")
