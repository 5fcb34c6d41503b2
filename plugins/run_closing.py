"""A run that Airflow gives up without its last tasks is closed in the ledger, and the reaper ends what it still has.

`judge` closes a run whose teardowns run. After a `dagrun_timeout` Airflow skips them, and it runs none of a run whose
DAG has lost its tasks; but the callbacks of a DAG are called then, too.
"""

import logging
from datetime import UTC, datetime
from typing import Any

from run_name import run_name

log = logging.getLogger(__name__)


def close_what_failed(context: Any) -> None:
    """Called by the DAG processor once a run has failed; one that somebody has started again since stays open."""
    from tasks import settings
    from tasks.ledger import Ledger
    from tasks.ledger.runs import close_given_up

    name = run_name(context["dag"].dag_id, context["run_id"])
    failed_at = getattr(context.get("dag_run"), "end_date", None) or datetime.now(UTC)
    deployment = settings.current()
    with Ledger(deployment.database_url(), deployment.sql) as ledger:
        if close_given_up(ledger, name, failed_at):
            log.warning("run %s failed without its last tasks: it is closed, and reap ends what it has", name)
