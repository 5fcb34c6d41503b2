"""Preflight: is everything there that this run will need? It only looks, and says all problems at once.

What is wrong with the spec, or with the input that it names, is an InputError that names the field. Later
stages check again what they depend on: the world changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.contract import Context, Outcome
from tasks.errors import InputError, StageFailed
from tasks.preflight.check import Check, look
from tasks.preflight.deployment import deployment_checks
from tasks.preflight.layout import layout_checks
from tasks.preflight.model import model_checks
from tasks.preflight.node import node_checks
from tasks.preflight.spec import deadline_ahead, spec_checks
from tasks.settings import Settings
from tasks.spec import RunSpec


@dataclass(frozen=True)
class Plan:
    """Preflight changes nothing, so its plan is always satisfied; the checks are in `verify`."""

    satisfied: bool = True
    reason: str = "preflight only looks, and every check passed"


def check_spec(spec: RunSpec, settings: Settings) -> None:
    """Refuse what can be known as wrong without ledger, hub and the spec's node.

    For whoever starts a run for the first time, before it is recorded: later, its deadline may be over. A path that
    holds an open date is not looked at.

    Raises:
        InputError: names every field that is wrong.
    """
    ahead = look("limits.deadline", "a time to come", lambda: deadline_ahead(spec))
    _refuse([*spec_checks(spec, settings), ahead])


def plan(context: Context) -> Plan:
    """Nothing is to be changed, ever."""
    return Plan()


def apply(plan: Plan, context: Context) -> None:
    """Not called: the plan is always satisfied."""


def verify(context: Context) -> Outcome:
    """Make every check; the facts list them as {check, found, needed, ok, to_do}.

    Raises:
        InputError: the spec, its input, or what it asks of this node is wrong.
        Unavailable: the ledger does not answer.
        StageFailed: something of the deployment is missing.
    """
    checks = [
        *spec_checks(context.run.spec, context.settings),
        *layout_checks(context),
        *model_checks(context),
        *deployment_checks(context),
        *node_checks(context),
    ]
    _refuse(checks)
    poor = sum(bool(check.to_do) for check in checks)
    message = f"{len(checks)} checks passed" + (f", {poor} of them with something to do" if poor else "")
    return Outcome(message, {"checks": [check.document() for check in checks]})


def _refuse(checks: Sequence[Check]) -> None:
    problems = [check for check in checks if not check.ok]
    if not problems:
        return
    # Two checks may stumble over one thing.
    said = list(dict.fromkeys(each.problem() for each in problems))
    number = "one problem" if len(said) == 1 else f"{len(said)} problems"
    message = "\n".join([f"{number} found before anything was started:", *(f"  {each}" for each in said)])
    errors = {check.error for check in problems if check.error is not None}
    # Whoever must change the spec anyhow is told first; otherwise a mixture needs an operator.
    raise (InputError if InputError in errors else errors.pop() if len(errors) == 1 else StageFailed)(message)
