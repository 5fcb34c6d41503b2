"""The spec of a run that makes a release and nothing else: the weights' part of a run spec."""

from collections.abc import Mapping
from typing import Any, Literal

from tasks.spec.document import parse
from tasks.spec.model import NO_BATCH, Convert, Model, Name, Part, RunSpec

_WITHOUT: Mapping[str, Any] = {
    "layout": {"cpu": 1},
    "batch": {"input": NO_BATCH, "output": NO_BATCH, "prompt": NO_BATCH},
}
"""The ledger knows runs of one kind; the stages of such a run look at none of this."""


class ReleaseSpec(Part):
    """Everything that making a release needs."""

    version: Literal[1] = 1
    """Of this document's schema."""
    tenant: Name = "default"
    """Who pays."""
    model: Model
    convert: Convert = Convert()
    node: Name = "local"
    """The host in whose store the release is made; one Airflow queue has the same name."""


def parse_release(document: Mapping[str, Any], source: str = "the spec") -> RunSpec:
    """The spec in a mapping, as a run spec without a batch.

    Raises:
        InputError: a field is unknown, missing or out of range; all of them are named at once.
    """
    given = {name: value for name, value in document.items() if name not in _WITHOUT}
    return parse({**given, **_WITHOUT}, source)
