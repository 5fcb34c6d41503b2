"""Reading a run spec from YAML or from a mapping, with errors that name the field."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tasks.errors import InputError
from tasks.spec.model import RunSpec

Kind = TypeVar("Kind", bound=BaseModel)


def read(path: Path) -> RunSpec:
    """The spec in a YAML file.

    Raises:
        InputError: the file cannot be read, is not YAML, or a field is wrong (each one is named).
    """
    document = load_yaml(path, f"the spec {path}")
    if not isinstance(document, Mapping):
        raise InputError(f"the spec {path} holds {type(document).__name__}, not a mapping of fields")
    return parse(document, source=str(path))


def load_yaml(path: Path, called: str) -> Any:
    """What stands in a YAML file, unchecked.

    Args:
        called: what the file is, for the message.

    Raises:
        InputError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{called} cannot be read: {error.strerror}") from None
    except Exception as error:
        # Not YAMLError alone: of `2026-02-30` PyYAML makes a ValueError, of `!!bool maybe` a KeyError.
        raise InputError(f"{called} is not YAML: {error}") from None


def parse(document: Mapping[str, Any], source: str = "the spec") -> RunSpec:
    """The spec in a mapping, as YAML, Airflow's conf or the ledger hold it.

    Raises:
        InputError: a field is unknown, missing or out of range; all of them are named at once.
    """
    return checked(RunSpec, document, source, "a run spec")


def checked(kind: type[Kind], document: Mapping[str, Any], source: str, called: str) -> Kind:
    """The same for a spec of another kind.

    Raises:
        InputError: as `parse`.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        lines = [f"  {_place(item['loc'])}: {_reason(dict(item))}" for item in error.errors()]
        raise InputError("\n".join([f"{source} is not {called}:", *lines])) from None


def _place(location: tuple[int | str, ...]) -> str:
    # Tags of the layout's union are pydantic's, not the user's.
    parts = list(location)
    if (
        parts[:1] == ["layout"]
        and len(parts) > 2
        and parts[1] in ("mig", "mig_parted", "tensor_parallel", "cpu")
    ):
        del parts[1]
    return ".".join(str(part) for part in parts) or "(whole document)"


def _reason(item: dict[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        return "there is no such field; see docs/run-spec.md for those that exist"
    if item["type"] == "missing":
        return "this field is required"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{message} (found {item['input']!r})" if not isinstance(item["input"], Mapping) else message
