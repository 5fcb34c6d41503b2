"""What is open in a spec (dates) is resolved once, when the run first starts, and never again.

The commit of the model and the library versions are frozen beside it; see `weights.pin`.
"""

import re
from datetime import datetime
from typing import Any

from tasks.errors import InputError
from tasks.spec import times
from tasks.spec.model import RunSpec

_PLACEHOLDER = re.compile(r"\{\{\s*(.*?)\s*\}\}")


def holds_dates(spec: RunSpec) -> bool:
    """Whether `spec` means something else on another day."""
    return _PLACEHOLDER.search(spec.model_dump_json()) is not None


def resolve_dates(spec: RunSpec, at: datetime) -> RunSpec:
    """`spec` with every `{{ ds }}`-like date written out as of `at`.

    Raises:
        InputError: a placeholder that is not a date.
    """
    return RunSpec.model_validate(_resolve(spec.model_dump(mode="json"), dates_of(at), place=""))


def resolve_deadline(spec: RunSpec, now: datetime) -> RunSpec:
    """`spec` with a deadline on the wall's clock written out as a moment; the next one after `now`."""
    until = times.resolve(spec.limits.deadline, now)
    return spec.model_copy(update={"limits": spec.limits.model_copy(update={"deadline": until})})


def dates_of(at: datetime) -> dict[str, str]:
    """The names that may stand in `{{ }}`, as Airflow calls them."""
    return {
        "ds": f"{at:%Y-%m-%d}",
        "ds_nodash": f"{at:%Y%m%d}",
        "ts_nodash": f"{at:%Y%m%dT%H%M%S}",
        "year": f"{at:%Y}",
        "month": f"{at:%m}",
        "day": f"{at:%d}",
    }


def _resolve(node: Any, dates: dict[str, str], place: str) -> Any:
    if isinstance(node, dict):
        return {key: _resolve(value, dates, f"{place}.{key}".lstrip(".")) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolve(value, dates, f"{place}[{index}]") for index, value in enumerate(node)]
    if not isinstance(node, str):
        return node

    def date(found: re.Match[str]) -> str:
        try:
            return dates[found[1]]
        except KeyError:
            raise InputError(
                f"{place}: {found[0]} is not known; a spec may hold {', '.join(dates)} in double braces"
            ) from None

    return _PLACEHOLDER.sub(date, node)
