"""docs/run-spec.md, written from the model: `python -m tasks.spec.reference > docs/run-spec.md`."""

from collections.abc import Iterator
from typing import Any

from tasks.spec.params import json_schema
from tasks.spec.tables import alternatives, default_of, meaning, type_of

_INTRODUCTION = """\
# The run spec

Everything a run needs, in one versioned document. The same schema is the DAG's form, the REST `conf` and the YAML
file of `qwen-pipeline --spec`; this page is written from it (`python -m tasks.spec.reference`).

Unknown fields are refused. Strings may hold `{{ ds }}`, `{{ ds_nodash }}`, `{{ ts_nodash }}`, `{{ year }}`,
`{{ month }}` and `{{ day }}`: they are resolved once, when the run first starts. On the command line such
a run is named (`--run NAME`), or its day is (`--date 2026-05-31`).

```yaml
version: 1
tenant: prod
model:   {repo: Qwen/Qwen3.5-9B, revision: main}
convert: {scheme: awq, group_size: 128}
node:    dgx-01
layout:  {mig: {"3g.40gb": 2}, gpus: all}
serving: {max_model_len: 4096, max_num_seqs: 256}
batch:
  input:  /prompts/{{ ds }}/
  output: /answers/{{ ds }}/
  id: row_id
  prompt: prompt
  sampling: {max_tokens: 512, temperature: 0.7}
limits:  {deadline: 6h, max_row_error_rate: 0.02}
```
"""


def render() -> str:
    """The page as Markdown."""
    properties = json_schema()["properties"]
    return (
        "\n".join(
            [
                _INTRODUCTION,
                *_table("Top level", "Fields without parts of their own.", _leaves(properties)),
                *(line for name, part in properties.items() for line in _part(name, part)),
            ]
        ).rstrip("\n")
        + "\n"
    )


def _part(name: str, schema: dict[str, Any]) -> Iterator[str]:
    several = len(alternatives(schema)) > 1
    for alternative in alternatives(schema):
        properties = alternative["properties"]
        title = f"{name} ({next(iter(properties))})" if several else name
        text, required = alternative.get("description", ""), alternative.get("required", ())
        yield from _table(f"`{title}`", text, properties, required)
        for inner, schema_of_inner in properties.items():
            yield from _part(f"{name}.{inner}", schema_of_inner)


def _table(title: str, text: str, properties: dict[str, Any], required: Any = ()) -> Iterator[str]:
    yield from (f"## {title}", "", text, "", "| field | type | default | meaning |", "|---|---|---|---|")
    for name, schema in properties.items():
        default = default_of(name, schema, required)
        yield f"| `{name}` | {type_of(schema)} | {default} | {meaning(schema)} |"
    yield ""


def _leaves(properties: dict[str, Any]) -> dict[str, Any]:
    return {name: schema for name, schema in properties.items() if not alternatives(schema)}


if __name__ == "__main__":
    print(render(), end="")
