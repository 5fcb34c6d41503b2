"""The runs that start by themselves: a DAG for each file in the folder of nightly runs.

A file holds a schedule and a run spec (docs/nightly.md). Dates in the spec are those of the night, on the wall
where the schedule is, and stay what they were when a run is cleared or runs late. Runs of one DAG take turns;
runs of different ones wait for each other's devices in the order in which they came.
"""

from datetime import timedelta
from typing import Any

import pendulum
from airflow.sdk import DAG, CronTriggerTimetable
from airflow.sdk.exceptions import AirflowTimetableInvalid
from batch_run import batch_run
from croniter import CroniterError, croniter
from deadline_alert import warning
from pipeline_tasks import freeze, run_spec_params
from run_notifications import notifications

from tasks import settings
from tasks.errors import InputError
from tasks.spec import RunSpec
from tasks.spec.nightly import Nightly, Refused, read_folder

# Airflow reckons a DAG's first night anew each time it reads the file: one that has just begun must not be passed over.
# (Its `run_immediately=False` means a tenth of the time between two nights.)
_JUST_BEGUN = timedelta(minutes=10)


def nightly(one: Nightly) -> DAG:
    """The DAG of one file.

    Raises:
        InputError: there is no such node.
    """
    queue = settings.current().queue_of(one.spec.node)
    zone = one.schedule.timezone
    nights = CronTriggerTimetable(one.schedule.cron, timezone=zone, run_immediately=_JUST_BEGUN)
    nights.validate()
    # The 31st of February is an expression too, and Airflow would wait for it without a word.
    croniter(one.schedule.cron).get_next()
    start = one.schedule.start
    dag = DAG(
        f"qwen_nightly_{one.name}",
        schedule=nights,
        # Without one, nothing is made up for when the DAG is first switched on.
        start_date=start and pendulum.datetime(start.year, start.month, start.day, tz=zone),
        catchup=one.schedule.catchup,
        max_active_runs=1,
        params=run_spec_params(one.spec),
        deadline=warning(one.spec, zone),
        tags=["qwen", "nightly", f"tenant:{one.spec.tenant}"],
        doc_md=f"{one.schedule.cron} ({zone}), tenant {one.spec.tenant}, node {one.spec.node}.\n\n{__doc__}",
        **notifications(),
    )
    with dag:
        batch_run(freeze(node=queue), queue)
    return dag


def refused(name: str, reason: str) -> DAG:
    """A file that is wrong is seen, by name and with the reason, and takes no other DAG with it.

    It has all tasks of a run: Airflow takes from runs that are under way whatever task their DAG has no longer, and a
    run whose file is spoilt meanwhile must still stop its workers and give its devices back. No new run starts.
    """

    def refuse(document: dict[str, Any], source: str) -> RunSpec:
        raise InputError(reason)

    dag = DAG(
        f"qwen_nightly_{name}",
        schedule=None,
        max_active_runs=1,
        tags=["qwen", "nightly", "refused"],
        doc_md=f"This file cannot be scheduled:\n\n```\n{reason}\n```",
        **notifications(),
    )
    with dag:
        batch_run(freeze(refuse))
    return dag


for found in read_folder(settings.current().nightly_folder):
    if isinstance(found, Refused):
        refused(found.name, found.reason)
        continue
    try:
        nightly(found)
    except InputError as error:
        refused(found.name, str(error))
    except (AirflowTimetableInvalid, CroniterError) as error:
        refused(found.name, f"schedule.cron: {found.schedule.cron!r} is no cron expression: {error}")
    except Exception as error:
        # Whatever Airflow has against one file, it is not to take the others with it.
        refused(found.name, f"Airflow makes no DAG of it: {type(error).__name__}: {error}")
