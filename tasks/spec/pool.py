"""The spec of a run that keeps a pool of workers for people to query, and asks no rows."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from tasks.spec.document import checked, parse
from tasks.spec.model import (
    LIMITS,
    NO_BATCH,
    WEIGHTS,
    WHO,
    WORKERS,
    Convert,
    Layout,
    Model,
    Name,
    Part,
    RunSpec,
    Serving,
    section,
)
from tasks.spec.times import Duration, Until

_UNTIL_STOPPED = "3650d"
_NO_BATCH: Mapping[str, Any] = {"input": NO_BATCH, "output": NO_BATCH, "prompt": NO_BATCH}


class PoolSpec(Part):
    """Everything that keeping a pool needs."""

    version: Literal[1] = Field(default=1, json_schema_extra=section(WHO))
    """Of this document's schema."""
    tenant: Name = Field(default="default", json_schema_extra=section(WHO))
    """Who pays; the pool's devices count for the tenant's quota as long as it is kept."""
    until: Until | None = Field(default="8h", json_schema_extra=section(LIMITS))
    """When the pool ends: a time from its start, the next time that the wall's clock shows (`18:00`, in the DAG's time
    zone), or a moment (`2026-12-01T18:00+01:00`). null: when somebody stops it."""
    wait: Duration = Field(default="12h", json_schema_extra=section(LIMITS))
    """How long the run may wait for devices that another one holds. It holds nothing then."""
    model: Model = Field(json_schema_extra=section(WEIGHTS))
    convert: Convert = Field(default=Convert(), json_schema_extra=section(WEIGHTS))
    node: Name = Field(default="local", json_schema_extra=section(WORKERS))
    """The host whose GPUs are used; one Airflow queue has the same name."""
    layout: Layout = Field(json_schema_extra=section(WORKERS))
    serving: Serving = Field(default=Serving(), json_schema_extra=section(WORKERS))


def parse_pool(document: Mapping[str, Any], source: str = "the spec") -> RunSpec:
    """The spec in a mapping, as a run spec without a batch, whose deadline is the pool's end.

    Raises:
        InputError: a field is unknown, missing or out of range; all of them are named at once.
    """
    asked = checked(PoolSpec, document, source, "the spec of a pool").model_dump(mode="json", by_alias=True)
    until, wait = asked.pop("until"), asked.pop("wait")
    # A pool serves until its last second: nothing is to be finished or published after it.
    limits = {"deadline": until or _UNTIL_STOPPED, "wait": wait, "wind_down": "1s"}
    return parse({**asked, "batch": _NO_BATCH, "limits": limits}, source)
