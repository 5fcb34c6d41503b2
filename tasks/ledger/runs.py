"""Runs: a spec, frozen when it first starts, and its verdict at the end."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from psycopg.types.json import Jsonb

from tasks.errors import InputError
from tasks.ledger.connection import Ledger
from tasks.spec import RunSpec, parse, times


@dataclass(frozen=True)
class Run:
    """One execution of a spec, as the ledger holds it."""

    run_id: str
    spec: RunSpec
    """With every date resolved."""
    pins: dict[str, Any]
    """What else was open: `commit` of the model, `versions` of the converting libraries."""
    started_at: datetime
    due_from: datetime
    """Whence its deadline counts: its start, or a later one after its end."""
    verdict: str | None

    @property
    def deadline(self) -> datetime:
        """When its answers are to be there."""
        return times.moment_of(self.spec.limits.deadline, self.due_from)

    @property
    def winds_down_at(self) -> datetime:
        """From then on it starts nothing that would have to finish."""
        span_s = (self.deadline - self.due_from).total_seconds()
        return self.deadline - timedelta(seconds=self.spec.limits.wind_down_s(span_s))


@dataclass(frozen=True)
class Known:
    """A run without its spec, which an older version may have frozen in a form that is not read any more."""

    run_id: str
    verdict: str | None


def register(ledger: Ledger, run_id: str, spec: RunSpec, pins: dict[str, Any]) -> Run:
    """Record that `run_id` starts with `spec`; a run that has started before stays as it was frozen then."""
    document = spec.model_dump(mode="json")
    with ledger.transaction() as connection:
        ledger.queries.insert_run(
            connection,
            run_id=run_id,
            tenant=spec.tenant,
            node=spec.node,
            spec=Jsonb(document),
            pins=Jsonb(pins),
        )
    return load(ledger, run_id)


def load(ledger: Ledger, run_id: str) -> Run:
    """The run of that name.

    Raises:
        InputError: there is none.
    """
    found = find(ledger, run_id)
    if found is None:
        raise InputError(
            f"there is no run {run_id!r} in the ledger; `qwen-pipeline status` lists those there are"
        )
    return found


def find(ledger: Ledger, run_id: str) -> Run | None:
    """The run of that name, or None."""
    with ledger.transaction() as connection:
        row = ledger.queries.run_by_id(connection, run_id=run_id)
    if row is None:
        return None
    return Run(
        row["run_id"],
        parse(row["spec"], f"run {run_id}"),
        row["pins"],
        row["started_at"],
        row["due_from"],
        row["verdict"],
    )


def known(ledger: Ledger, run_id: str) -> Known | None:
    """The run of that name as far as it needs no spec, or None."""
    with ledger.transaction() as connection:
        row = ledger.queries.run_by_id(connection, run_id=run_id)
    return None if row is None else Known(row["run_id"], row["verdict"])


def reckon_deadline_anew(ledger: Ledger, run_id: str, deadline: str) -> Run:
    """Let the deadline of a run that has ended count from now on; one that is open keeps its own.

    Args:
        deadline: a time from now on, or a moment.
    """
    with ledger.transaction() as connection:
        ledger.queries.reckon_deadline_anew(connection, run_id=run_id, deadline=deadline)
    return load(ledger, run_id)


def close(ledger: Ledger, run_id: str, verdict: str) -> None:
    """End the run as `done`, `partial` or `failed`. A stage claimed after that opens it again."""
    with ledger.transaction() as connection:
        ledger.queries.close_run(connection, run_id=run_id, verdict=verdict)


def close_given_up(ledger: Ledger, run_id: str, failed_at: datetime) -> bool:
    """End as `failed` a run that was given up then; returns whether it is that, and not closed or begun again since."""
    with ledger.transaction() as connection:
        return bool(ledger.queries.close_given_up_run(connection, run_id=run_id, failed_at=failed_at))
