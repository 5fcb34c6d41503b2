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
from hashlib import sha256
from pathlib import Path
from typing import Any, Self
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tasks.errors import InputError
from tasks.spec.document import load_yaml, parse
from tasks.spec.model import RunSpec

_LONGEST_NAME = 100
"""Runs have their DAG's name in theirs, and a lock or a log is a file with a run's name."""


class Schedule(BaseModel):
    """When a run starts by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cron: str = Field(pattern=r"^\S+( \S+){4}$", examples=["0 22 * * *"])
    """Minute, hour, day of month, month, day of week."""
    timezone: str = Field(default="UTC", examples=["Europe/Berlin"])
    """Of the cron expression, and of the dates in the spec: `{{ ds }}` is the day on the wall there."""
    catchup: bool = False
    """Whether nights that were missed (the scheduler was down, the DAG paused) are made up for, each on its own.
    false: the last one only, at once when the DAG is switched on again."""
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
    """Every `*.yaml` and `*.yml` of the folder, each under a name of its own; nothing where there is no such folder."""
    found: list[Nightly | Refused] = []
    taken: dict[str, Path] = {}
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")], key=_precedence):
        name = _name(path)
        if len(name) > _LONGEST_NAME:
            found.append(
                Refused(_distinct(path), f"the name of {path} is longer than {_LONGEST_NAME} characters")
            )
        elif name in taken:
            reason = (
                f"{path} and {taken[name]} would be one DAG, {name}, and the second is refused: rename it"
            )
            found.append(Refused(_distinct(path), reason))
        else:
            taken[name] = path
            found.append(_nightly_or_refused(path))
    return found


def _nightly_or_refused(path: Path) -> Nightly | Refused:
    try:
        return read_nightly(path)
    except InputError as error:
        return Refused(_name(path), str(error))


def read_nightly(path: Path) -> Nightly:
    """One file.

    Raises:
        InputError: it cannot be read, is not YAML, or a field is wrong (each one is named).
    """
    document = load_yaml(path, str(path))
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
    """What may stand in the name of a DAG, and of a run: no two dots in a row."""
    return re.sub(r"[^A-Za-z0-9_.-]|\.(?=\.)", "_", path.stem)


def _distinct(path: Path) -> str:
    """A name that no other file has."""
    return f"{_name(path)[:_LONGEST_NAME]}_{sha256(path.name.encode()).hexdigest()[:8]}"


def _precedence(path: Path) -> tuple[str, bool, str]:
    """Of files with one name the one comes first that is called just so: a newcomer takes nobody's DAG."""
    return _name(path), _name(path) != path.stem, path.name


def _line(item: Any) -> str:
    place = ".".join(str(part) for part in ("schedule", *item["loc"]))
    return f"  {place}: {str(item['msg']).removeprefix('Value error, ')}"
