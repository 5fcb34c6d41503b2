"""The run spec as JSON schema: one schema for the whole document, and one for each field of Airflow's form.

Airflow checks every Param against its own schema, so references are written out in place. What only the form
reads (`section`, `title`, `description_md`) stands beside it: a validator passes over words it does not know.
"""

from functools import cache
from typing import Any

from pydantic import BaseModel

from tasks.spec.model import RunSpec
from tasks.spec.tables import help_text

_ONLY_AN_EXAMPLE: dict[str, Any] = {
    "model": {"repo": "Qwen/Qwen3.5-9B", "revision": "main"},
    "layout": {"mig": {"3g.40gb": 2}, "gpus": "all"},
    "batch": {
        "input": "/prompts/{{ ds }}/",
        "output": "/answers/{{ ds }}/",
        "id": "row_id",
        "prompt": "prompt",
    },
}
"""Fields without a default still need a first value in the form."""

_DRAFT = "http://json-schema.org/draft-07/schema#"
"""What we use of JSON schema means the same in all drafts. Airflow proves a Param's schema sound each time it looks at
a value, 487 times while it reads dags/: with this draft a look takes a third of what it takes with the newest."""


@cache
def json_schema(spec: type[BaseModel] = RunSpec) -> dict[str, Any]:
    """The schema of the whole document, references written out. Shared: do not change it."""
    schema = spec.model_json_schema(by_alias=True)
    definitions = schema.pop("$defs", {})
    written_out = _write_out(schema, definitions)
    assert isinstance(written_out, dict)
    return written_out


def fields(spec: type[BaseModel] = RunSpec) -> dict[str, tuple[Any, dict[str, Any]]]:
    """For each top-level field: its first value in the form, and its JSON schema."""
    return {
        name: (_ONLY_AN_EXAMPLE.get(name, schema.get("default")), _for_the_form(name, schema))
        for name, schema in json_schema(spec)["properties"].items()
    }


def _for_the_form(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in schema.items() if key not in ("default", "description")}
    if "oneOf" in kept:
        # Every kind is an object; said once more for the form, which chooses its editor by the type.
        kept["type"] = "object"
    return {"$schema": _DRAFT, **kept, "title": name, "description_md": help_text(schema)}


def _write_out(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_write_out(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[-1]]
        node = {
            **target,
            **{key: value for key, value in node.items() if key != "$ref"},
        }
    return {key: _write_out(value, definitions) for key, value in node.items()}
