"""docs/settings.md, written from the settings: `python -m tasks.settings_reference > docs/settings.md`."""

from pathlib import Path
from typing import Any

from tasks.settings import REPOSITORY, Settings

_INTRODUCTION = """\
# Settings

Every knob of a deployment, as an environment variable of the process (Airflow's services, or the command line). What
belongs to one run is in its [run spec](run-spec.md). This page is written from `tasks/settings.py`
(`python -m tasks.settings_reference`); paths are relative to the repository.

| variable | default | why |
|---|---|---|
"""


def render() -> str:
    """The page as Markdown."""
    prefix = Settings.model_config["env_prefix"]
    rows = []
    for name, field in Settings.model_fields.items():
        variable = (
            field.validation_alias if isinstance(field.validation_alias, str) else f"{prefix}{name.upper()}"
        )
        why = " ".join((field.description or "").split())
        rows.append(f"| `{variable}` | {_shown(field.get_default(call_default_factory=True))} | {why} |\n")
    return _INTRODUCTION + "".join(rows)


def _shown(default: Any) -> str:
    if default is None or default == "":
        return ""
    if isinstance(default, Path):
        default = default.relative_to(REPOSITORY) if default.is_relative_to(REPOSITORY) else default
    return f"`{default}`"


if __name__ == "__main__":
    print(render(), end="")
