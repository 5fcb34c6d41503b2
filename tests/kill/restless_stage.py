"""A stage that only the harness's own tests know: its plan is never satisfied, not even by its own work."""

from tasks.contract import Context, Outcome
from tests.kill.toy_stage import Plan


def plan(context: Context) -> Plan:
    """Never satisfied."""
    return Plan(False, "something can always be done")


def apply(wanted: Plan, context: Context) -> None:
    """Changes nothing."""


def verify(context: Context) -> Outcome:
    """Finds all well."""
    return Outcome("all is well")
