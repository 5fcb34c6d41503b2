"""Preflight: is everything there that this run will need? It only looks, and says all problems at once.

What is wrong with the spec, or with the input that it names, is an InputError that names the field. What is wrong
with the node or the deployment is a StageFailed. Later stages check again what they depend on: the world changes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tasks.contract import Context, Outcome
from tasks.errors import InputError, StageError, StageFailed
from tasks.preflight.check import Check
from tasks.preflight.deployment import deployment_checks
from tasks.preflight.layout import layout_checks
from tasks.preflight.spec import spec_checks
from tasks.settings import Settings
from tasks.spec import RunSpec


@dataclass(frozen=True)
class Plan:
    """Preflight changes nothing, so its plan is always satisfied; the checks are in `verify`."""

    satisfied: bool = True
    reason: str = "preflight only looks, and every check passed"


def check_spec(spec: RunSpec, settings: Settings) -> None:
    """Refuse what needs neither ledger, hub nor the spec's node to be known as wrong.

    For whoever starts a run, before the run is recorded. What holds an unresolved date is not looked at.

    Raises:
        InputError: names every field that is wrong.
    """
    _refuse(spec_checks(spec, settings), InputError)


def plan(context: Context) -> Plan:
    """Nothing is to be changed, ever."""
    return Plan()


def apply(plan: Plan, context: Context) -> None:
    """Not called: the plan is always satisfied."""


def verify(context: Context) -> Outcome:
    """Make every check; the facts list them as {check, found, needed, ok}.

    Raises:
        InputError: the spec, its input, or what it asks of this node is wrong.
        StageFailed: something of the deployment is missing.
    """
    spec, settings = context.run.spec, context.settings
    by_user = [*spec_checks(spec, settings), *layout_checks(context)]
    by_operator = deployment_checks(context)
    checks = [*by_user, *by_operator]
    _refuse(checks, StageFailed if all(check.ok for check in by_user) else InputError)
    return Outcome(f"{len(checks)} checks passed", {"checks": [asdict(check) for check in checks]})


def _refuse(checks: Sequence[Check], error: type[StageError]) -> None:
    problems = [check for check in checks if not check.ok]
    if problems:
        number = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"  {check.problem()}" for check in problems]
        raise error("\n".join([f"{number} found before anything was started:", *lines]))
