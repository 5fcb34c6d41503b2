"""What the DAG of a pool has besides stages: the task that keeps it."""

import logging
from datetime import UTC, datetime, timedelta

from airflow.sdk import get_current_context, task
from pipeline_tasks import RETRIES, RETRY_DELAY, answer, impatient_settings, name_of_run
from run_links import show_links

from tasks import settings
from tasks.errors import Busy, StageError

log = logging.getLogger(__name__)

_STEPS = 5
"""A pool is looked at this much less often than one looks for free devices: its keeper mends it by itself."""

_HOW_TO_STOP = """Holds the pool until its time is up, without a worker slot.

**To query it**: the link *Workers and their logs* lists the endpoints and says how to get the key.

**To stop it before**: mark this task as success. The workers are stopped and the devices given back.
"""


@task(task_id="keep", retries=RETRIES, retry_delay=RETRY_DELAY, doc_md=_HOW_TO_STOP)
def keep_pool() -> str:
    """Look at the pool now and then; one that broke is provisioned and started again."""
    from airflow.sdk.exceptions import AirflowRescheduleException

    from tasks import stages
    from tasks.ledger import Ledger, load
    from tasks.serving import keep

    context = get_current_context()
    show_links(context)
    deployment, name = impatient_settings(), name_of_run(context)
    try:
        with Ledger(deployment.database_url(), deployment.sql) as ledger:
            run = load(ledger, name)
            kept = keep.look(ledger, run, deployment)
        if kept.state is keep.State.OVER:
            return kept.says
        log.info("%s; until %s", kept.says, run.deadline.isoformat())
        if kept.state is keep.State.BROKEN:
            for stage in ("provision", "start"):
                log.info("%s: %s", stage, stages.execute(stage, name, settings=deployment).message)
    except Busy as error:
        log.info("%s", error)
    except StageError as error:
        answer(error, context)
    step = timedelta(seconds=_STEPS * settings.current().wait_step_s)
    raise AirflowRescheduleException(min(datetime.now(UTC) + step, run.deadline + timedelta(seconds=1)))
