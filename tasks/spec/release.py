"""The spec of a run that makes a release and nothing else: the weights' part of a run spec."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from tasks.spec.document import checked, parse
from tasks.spec.model import NO_BATCH, WEIGHTS, WHO, WORKERS, Convert, Model, Name, Part, RunSpec, section

_WITHOUT: Mapping[str, Any] = {
    "layout": {"cpu": 1},
    "batch": {"input": NO_BATCH, "output": NO_BATCH, "prompt": NO_BATCH},
}
"""The ledger knows runs of one kind; the stages of such a run look at none of this."""


class ReleaseSpec(Part):
    """Everything that making a release needs."""

    version: Literal[1] = Field(default=1, json_schema_extra=section(WHO))
    """Of this document's schema."""
    tenant: Name = Field(default="default", json_schema_extra=section(WHO))
    """Who pays."""
    model: Model = Field(json_schema_extra=section(WEIGHTS))
    convert: Convert = Field(default=Convert(), json_schema_extra=section(WEIGHTS))
    node: Name = Field(default="local", json_schema_extra=section(WORKERS))
    """The host in whose store the release is made; one Airflow queue has the same name."""


def parse_release(document: Mapping[str, Any], source: str = "the spec") -> RunSpec:
    """The spec in a mapping, as a run spec without a batch.

    Raises:
        InputError: a field is unknown, missing or out of range; all of them are named at once.
    """
    asked = checked(ReleaseSpec, document, source, "the spec of a release")
    return parse({**asked.model_dump(mode="json", by_alias=True), **_WITHOUT}, source)
