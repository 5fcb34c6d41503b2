"""What every stage looks like.

A stage is a module with three functions:

    plan(context) -> Plan        what differs between the spec and the world; reads only
    apply(plan, context) -> None changes only that; never called for a satisfied plan
    verify(context) -> Outcome   reads the world again; raises when it is not as promised

The plan compares with the world (files, processes, devices), never with a flag in the ledger, so a shard that
was deleted or a worker that was killed behind the pipeline's back is noticed and mended by the next run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from tasks.errors import InputError
from tasks.ledger import Claim, Run
from tasks.ledger.claims import facts_of
from tasks.settings import Settings
from tasks.spark import SparkSubmission
from tasks.spec import RunSpec


class Plan(Protocol):
    """The difference between what the spec asks for and what is there."""

    @property
    def satisfied(self) -> bool:
        """Whether nothing differs."""

    @property
    def reason(self) -> str:
        """Why there is nothing to do, or what will be done; one line for a person."""


@dataclass(frozen=True)
class Outcome:
    """What a stage found when it read the world again."""

    message: str
    """One line for a person."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Ids and small numbers for later stages, XCom and `--json`; never rows, weights or secrets."""


@dataclass(frozen=True)
class Context:
    """What a stage acts on and with."""

    run: Run
    claim: Claim
    settings: Settings
    submit: Callable[[SparkSubmission], None]
    """Runs a Spark application and returns when it has ended: Airflow's operator or a child process."""

    @property
    def part(self) -> str:
        """The mark of this stage's child processes."""
        return f"{self.run.run_id}/{self.claim.stage}"


def why_no_pool(context: Context) -> str | None:
    """Why a run needs no devices and no workers; None when it does. A run without a batch is there to have them."""
    if datetime.now(UTC) >= context.run.winds_down_at:
        return f"the run's deadline is over or near (limits.deadline = {context.run.spec.limits.deadline})"
    prepared = facts_of(context.claim.ledger, context.run.run_id, "prepare")
    if prepared is not None and prepared["to_do"] == 0:
        return "no row is left to do"
    return None


def refuse_other_node(spec: RunSpec, settings: Settings) -> None:
    """Devices are leased, used and given back on their own node only.

    Raises:
        InputError: this host is another one than the spec names.
    """
    if spec.node != settings.node:
        raise InputError(
            f"node: the spec asks for {spec.node!r}, and this host is {settings.node!r} "
            f"(QWEN_PIPELINE_NODE): execute this stage there, or change the spec"
        )


class StageModule(Protocol):
    """The three functions, as the executor calls them."""

    def plan(self, context: Context) -> Any:
        """See the module docstring."""

    def apply(self, plan: Any, context: Context) -> None:
        """See the module docstring."""

    def verify(self, context: Context) -> Outcome:
        """See the module docstring."""
