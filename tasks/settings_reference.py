"""docs/settings.md, written from the settings: `python -m tasks.settings_reference > docs/settings.md`."""

import json
from pathlib import Path
from typing import Any

from tasks.settings import REPOSITORY, Settings, variable

_INTRODUCTION = """\
# Settings

Every knob of a deployment, as an environment variable of the process (Airflow's services, or the command line). What
belongs to one run is in its [run spec](run-spec.md). This page is written from `tasks/settings.py`
(`python -m tasks.settings_reference`); paths are relative to the repository, lists and objects are JSON.

| variable | default | why |
|---|---|---|
"""


def render() -> str:
    """The page as Markdown."""
    rows: list[str] = []
    defaults: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        defaults[name] = field.get_default(call_default_factory=True, validated_data=defaults)
        why = " ".join((field.description or "").split())
        rows.append(f"| `{variable(name)}` | {_shown(defaults[name])} | {why} |\n")
    return _INTRODUCTION + "".join(rows)


def _shown(default: Any) -> str:
    if default is None or default == "":
        return ""
    if isinstance(default, Path):
        default = default.relative_to(REPOSITORY) if default.is_relative_to(REPOSITORY) else default
    # As it is written in the environment: lists and objects are JSON there.
    return f"`{json.dumps(default) if isinstance(default, tuple | dict | bool) else default}`"


if __name__ == "__main__":
    print(render(), end="")
