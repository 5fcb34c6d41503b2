"""What goes wrong in a cell, once the stage it goes wrong in is running."""

from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from demo.airflow_api import AirflowApi
from tasks.node import processes
from tests.chaos.world import World


class Missed(Exception):
    """The cell could not be brought about; says why."""


@dataclass(frozen=True)
class Act:
    """Where it goes wrong."""

    world: World
    api: AirflowApi
    dag_id: str
    run_id: str
    stage: str

    @property
    def name(self) -> str:
        """The run's name in the ledger."""
        return self.run_id if self.dag_id == "qwen_batch" else f"{self.dag_id}.{self.run_id}"


@dataclass(frozen=True)
class Event:
    """One kind of failure."""

    name: str
    happens: Callable[[Act], None]
    must_fail: bool = False
    """Whether a person or Airflow has decided that the run has failed, so that its state must say so."""
    after_success: bool = False
    """Happens once the run has succeeded, and not while the stage is running."""
    dag_id: str = "qwen_batch"
    undo: Callable[[Act], None] | None = None
    """What an operator does before the rerun."""


def _kill_task(act: Act) -> None:
    process = act.world.acting(act.name, act.stage)
    if process is None or not process.is_alive():
        raise Missed(f"stage {act.stage} had ended before it could be killed")
    processes.end([process], grace_s=0)


def _kill_scheduler(act: Act) -> None:
    scheduler = act.world.children.find("airflow-scheduler")
    assert scheduler is not None
    processes.end([scheduler], grace_s=0)
    act.world.airflow.start_again("scheduler")


def _kill_everything(act: Act) -> None:
    act.world.kill_everything()
    act.world.start()


def _restart_postgres(act: Act) -> None:
    processes.end(act.world.children.living("postgres"), grace_s=0)
    act.world.cluster.start()


def _time_out(act: Act) -> None:
    # The scheduler compares the run's start with the DAG's dagrun_timeout, an hour: so it started long ago.
    with psycopg.connect(act.world.cluster.url("airflow")) as connection:
        connection.execute(
            "update dag_run set start_date = start_date - interval '2 hours' where dag_id = %s and run_id = %s",
            (act.dag_id, act.run_id),
        )


def _fill_disk(act: Act) -> None:
    act.world.small_disk.fill()


EVENTS = (
    Event("task killed -9", _kill_task),
    Event(
        "task marked failed", lambda act: act.api.fail_task(act.dag_id, act.run_id, act.stage), must_fail=True
    ),
    Event("run marked failed", lambda act: act.api.fail(act.dag_id, act.run_id), must_fail=True),
    Event("run cleared", lambda act: act.api.clear(act.dag_id, act.run_id)),
    Event(
        "cleared after success",
        lambda act: act.api.clear_task(act.dag_id, act.run_id, act.stage),
        after_success=True,
    ),
    Event("dagrun_timeout", _time_out, must_fail=True, dag_id="qwen_timed"),
    Event("scheduler killed", _kill_scheduler),
    Event("everything killed", _kill_everything),
    Event("PostgreSQL killed", _restart_postgres),
    Event("disk full", _fill_disk, undo=lambda act: act.world.small_disk.free()),
)
