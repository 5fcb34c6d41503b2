"""Scheduled runs: a folder of YAML files, one for each tenant and hour, each with a run spec of its own.

    schedule: {cron: "0 22 * * *", timezone: Europe/Berlin}
    spec:
      tenant: prod
      ...                                  # a run spec, see docs/run-spec.md

The file's name is the name of its DAG. A file that is wrong never takes the others with it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Self
from zoneinfo import ZoneInfo

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tasks.errors import InputError
from tasks.spec.document import parse
from tasks.spec.model import RunSpec


class Schedule(BaseModel):
    """When a run starts by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cron: str = Field(pattern=r"^\S+( \S+){4}$", examples=["0 22 * * *"])
    """Minute, hour, day of month, month, day of week."""
    timezone: str = Field(default="UTC", examples=["Europe/Berlin"])
    """Of the cron expression, and of the dates in the spec: `{{ ds }}` is the day on the wall there."""
    catchup: bool = False
    """Whether nights that were missed (the scheduler was down, the DAG paused) are made up for, each on its own.
    false: the last one only, at once when the DAG is switched on."""
    start: date | None = None
    """The first day, on the wall, for which there is a run; needed with `catchup`, lest a new file runs every night
    of the past."""

    @field_validator("timezone")
    @classmethod
    def _is_known(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (KeyError, OSError, ValueError):
            raise ValueError("no such time zone; names are as Europe/Berlin") from None
        return value

    @model_validator(mode="after")
    def _knows_what_to_catch_up_with(self) -> Self:
        if self.catchup and self.start is None:
            raise ValueError("`catchup: true` needs `start`, the first day for which there is a run")
        return self


@dataclass(frozen=True)
class Nightly:
    """One scheduled run."""

    name: str
    schedule: Schedule
    spec: RunSpec


@dataclass(frozen=True)
class Refused:
    """A file that cannot be scheduled, and why."""

    name: str
    reason: str


def read_folder(folder: Path) -> list[Nightly | Refused]:
    """Every `*.yaml` of the folder, by name; nothing where there is no such folder."""
    found: list[Nightly | Refused] = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            found.append(read_nightly(path))
        except InputError as error:
            found.append(Refused(_name(path), str(error)))
    return found


def read_nightly(path: Path) -> Nightly:
    """One file.

    Raises:
        InputError: it cannot be read, is not YAML, or a field is wrong (each one is named).
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {error}") from None
    if not isinstance(document, Mapping) or set(document) != {"schedule", "spec"}:
        raise InputError(f"{path} holds two fields, `schedule` and `spec`, and nothing else")
    try:
        schedule = Schedule.model_validate(document["schedule"])
    except ValidationError as error:
        raise InputError("\n".join([f"{path} has no good schedule:", *map(_line, error.errors())])) from None
    if not isinstance(document["spec"], Mapping):
        raise InputError(f"{path}: `spec` holds a run spec, a mapping of fields")
    return Nightly(_name(path), schedule, parse(document["spec"], source=f"`spec` in {path}"))


def _name(path: Path) -> str:
    """What may stand in the name of a DAG."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem)


def _line(item: Any) -> str:
    place = ".".join(str(part) for part in ("schedule", *item["loc"]))
    return f"  {place}: {str(item['msg']).removeprefix('Value error, ')}"
