"""Stages of the pipeline as Airflow tasks: the one place where the two meet.

A stage knows nothing of Airflow. Here it gets a task with its name and its text, its facts become the task's
XCom, and its typed errors become what Airflow does about them: fail at once, or retry.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import Param, get_current_context, task
from worker_link import WorkersLink

from tasks.errors import Remedy, StageError
from tasks.spec import params
from tasks.stages import STAGES

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

RETRIES = 3
RETRY_DELAY = timedelta(seconds=20)
"""For what a later try can mend: a hub or a database that did not answer, devices that are still held."""


_WITH_WORKERS = ("start", "stop")
"""Tasks that link to the logs of the run's workers. Airflow shows a link once its task has ended."""


def run_spec_params() -> dict[str, Param]:
    """One Param for each top-level field of the run spec, each with its JSON schema."""
    return {name: Param(first_value, **schema) for name, (first_value, schema) in params.fields().items()}


@task(
    retries=RETRIES, retry_delay=RETRY_DELAY, doc_md="Resolve dates, revision and versions once for this run."
)
def freeze() -> dict[str, Any]:
    """Start the run in the ledger; a run that has started keeps its spec."""
    from tasks import settings, spec, stages
    from tasks.ledger import Ledger
    from tasks.preflight import check_spec

    context = get_current_context()
    deployment = settings.current()
    run = context["dag_run"]
    try:
        asked = spec.parse(dict(context["params"]), source=f"the conf of run {run.run_id}")
        check_spec(asked, deployment)
        with Ledger(deployment.database_url(), deployment.sql) as ledger:
            frozen = stages.freeze(ledger, run.run_id, asked, run.logical_date or run.run_after, deployment)
    except StageError as error:
        give_up_or_retry(error)
    return {"run": frozen.run_id, "release_id": frozen.pins["release_id"], "commit": frozen.pins["commit"]}


def stage(name: str) -> Any:
    """The task that executes stage `name` of the run."""

    @task(task_id=name, retries=RETRIES, retry_delay=RETRY_DELAY, doc_md=STAGES[name].says)
    def execute() -> dict[str, Any]:
        from tasks import stages

        try:
            return vars(stages.execute(name, get_current_context()["dag_run"].run_id))
        except StageError as error:
            give_up_or_retry(error)

    executed = execute()
    if name in _WITH_WORKERS:
        executed.operator.operator_extra_links = (WorkersLink(),)
    return executed


@task(doc_md="Keeps a failed run failed: teardowns that succeed would hide it.")
def judge() -> str:
    """Close the run in the ledger and say how it went; fails when any of its tasks failed."""
    from airflow.sdk.exceptions import AirflowFailException

    from tasks import settings
    from tasks.ledger import Ledger, close

    context = get_current_context()
    instance: RuntimeTaskInstanceProtocol = context["ti"]
    states = instance.get_task_states(dag_id=instance.dag_id, run_ids=[instance.run_id])[instance.run_id]
    failed = sorted(name for name, state in states.items() if state in ("failed", "upstream_failed"))
    unfinished = sorted(name for name, state in states.items() if state == "skipped")
    deployment = settings.current()
    with Ledger(deployment.database_url(), deployment.sql) as ledger:
        close(ledger, instance.run_id, "failed" if failed or unfinished else "done")
    if failed or unfinished:
        raise AirflowFailException(
            f"the run failed: {', '.join(failed + unfinished)} did not succeed; see their logs"
        )
    return "done"


def give_up_or_retry(error: StageError) -> NoReturn:
    """Raise what makes Airflow do the right thing, with the message alone: a traceback would bury it."""
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    if error.remedy is Remedy.RETRY:
        raise AirflowException(f"{error} [a retry can help]") from None
    raise AirflowFailException(f"{error} [a retry does not help: {error.remedy.value}]") from None
