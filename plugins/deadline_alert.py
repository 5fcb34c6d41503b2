"""A warning some time before a run's deadline, by Airflow's own deadline alerts.

The moment depends on the run's spec, so it is worked out when a run is created: from its conf, or from the spec of
its DAG. What is done about a deadline does not wait for this: the run itself winds down (`limits.wind_down`).
"""

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from airflow import settings as airflow_settings
from airflow.sdk import AsyncCallback, DeadlineAlert
from airflow.sdk.definitions.deadline import BaseDeadlineReference
from run_name import run_name
from run_notifications import notifiers

from tasks import settings
from tasks.errors import StageError
from tasks.spec import Limits, RunSpec, times

log = logging.getLogger(__name__)


@dataclass
class BeforeTheDeadline(BaseDeadlineReference):
    """So long before the deadline of a run as its `limits.warn` says."""

    limits: dict[str, Any] = field(default_factory=dict)
    """Of the DAG, for a run whose conf has none."""
    timezone: str = "UTC"
    """Whose wall's clock a deadline like `07:00` means."""

    required_kwargs = frozenset({"dag_id", "run_id"})

    __hash__ = BaseDeadlineReference.__hash__

    def serialize_reference(self) -> dict[str, Any]:
        """As Airflow's database keeps it."""
        return {"reference_type": self.reference_name, "limits": self.limits, "timezone": self.timezone}

    @classmethod
    def deserialize_reference(cls, reference_data: dict[str, Any]) -> "BeforeTheDeadline":
        """The inverse."""
        return cls(reference_data["limits"], reference_data["timezone"])

    def _evaluate_with(self, *, session: Any, dag_id: str, run_id: str) -> datetime | None:
        from airflow.models import DagRun
        from sqlalchemy import select

        query = select(DagRun.conf).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        return self.moment(session.scalar(query) or {}, datetime.now(UTC))

    def moment(self, conf: dict[str, Any], now: datetime) -> datetime | None:
        """When to warn of a run that starts now; None for a conf that will be refused."""
        try:
            limits = Limits.model_validate(conf.get("limits") or self.limits)
        except ValueError:
            return None
        until = times.resolve(limits.deadline, now.astimezone(ZoneInfo(self.timezone)))
        deadline = times.moment_of(until, now)
        warn_s = limits.warn_s((deadline - now).total_seconds())
        return deadline.astimezone(UTC) - timedelta(seconds=warn_s)


def warning(spec: RunSpec | None = None, timezone: str | None = None) -> DeadlineAlert:
    """The alert of a DAG whose runs have `spec`, unless their conf says otherwise.

    Args:
        timezone: of the wall; None: Airflow's `default_timezone`, by which a run without a schedule is frozen, too.
    """
    limits = Limits() if spec is None else spec.limits
    timezone = timezone or str(airflow_settings.TIMEZONE)
    return DeadlineAlert(
        name="before the deadline",
        reference=BeforeTheDeadline(limits.model_dump(mode="json"), timezone),
        interval=timedelta(0),
        callback=AsyncCallback("deadline_alert.warn"),
    )


async def warn(context: dict[str, Any]) -> None:
    """Say how the run stands, in the triggerer's log and to whoever `notify` names for deadlines."""
    run = context["dag_run"]
    if run.get("state") in ("success", "failed"):
        # The ledger need not know it: a run may have been refused.
        return
    text = await asyncio.to_thread(_how_it_stands, run_name(run["dag_id"], run["dag_run_id"]))
    if text is None:
        return
    log.warning("%s", text)
    for notifier in notifiers("deadline"):
        notifier.context = {**context, "warning": text}
        try:
            await notifier
        except NotImplementedError:
            # Airflow calls those that cannot wait in a thread, too.
            await asyncio.to_thread(notifier, notifier.context)


def _how_it_stands(run_id: str) -> str | None:
    from tasks.cli.outlook import outlook

    try:
        return outlook(settings.current(), run_id)
    except StageError as error:
        return f"run {run_id} has not ended shortly before its deadline, and how it stands cannot be told: {error}"
