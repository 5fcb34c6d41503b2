"""Stages of the pipeline as Airflow tasks: the one place where the two meet.

A stage knows nothing of Airflow. Here it gets a task with its name and its text, its facts become the task's
XCom, and its typed errors become what Airflow does about them: fail at once, retry, or come again later.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn
from zoneinfo import ZoneInfo

from airflow.sdk import Param, get_current_context, task
from pydantic import BaseModel
from run_links import LINKS, show_links
from run_name import run_name

from tasks import settings
from tasks.errors import Busy, InputError, Remedy, StageError
from tasks.spec import Limits, RunSpec, params, parse
from tasks.stage_list import STAGES

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

    from tasks.ledger import Run
    from tasks.settings import Settings

Read = Callable[[dict[str, Any], str], RunSpec]

log = logging.getLogger(__name__)

RETRIES = 3
RETRY_DELAY = timedelta(seconds=settings.current().retry_delay_s)
"""For what a later try can mend: a hub or a database that did not answer."""

_HOLDS_THE_SLOT_S = 15.0
"""A stage that must wait for another run does so without a worker slot, but for this long."""


def run_spec_params(spec: RunSpec | None = None) -> dict[str, Param]:
    """One Param for each top-level field of the run spec, each with its JSON schema.

    Args:
        spec: the fields' first values; by default an example.
    """
    return form(RunSpec, {} if spec is None else spec.model_dump(mode="json", by_alias=True))


def form(kind: type[BaseModel], first: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Param]:
    """The Params of a kind of spec; what `first` does not say is an example, on this deployment's node."""
    first = {"node": settings.current().node, **first}
    return {
        name: Param(first.get(name, example), **schema)
        for name, (example, schema) in params.fields(kind).items()
    }


def freeze(read: Read = parse, by_hand: type[BaseModel] | None = None, node: str | None = None) -> Any:
    """The task that starts a run in the ledger; the other arguments are those of `start_run`.

    Args:
        node: whose queue it goes to, because it reads what only the node has; None: the default queue.
    """
    place = {"queue": node} if node else {}

    @task(
        task_id="freeze",
        retries=RETRIES,
        retry_delay=RETRY_DELAY,
        doc_md="Resolve dates, revision and versions once for this run.",
        **place,
    )
    def execute() -> dict[str, Any]:
        return start_run(read, by_hand)

    return with_links(execute())


def start_run(read: Read, by_hand: type[BaseModel] | None = None) -> dict[str, Any]:
    """Freeze the run of the task that is running. One that has started keeps its spec, whatever its DAG says today,
    but for a deadline that is over. A DAG run that was made anew does not pass for an ended one of another spec.

    Args:
        read: makes a run spec of the task's params, and names where they come from in errors.
        by_hand: of a DAG whose runs are all started by hand: the kind of its conf. What the conf does not name then
            is the form's example, and a run of the example is what nobody asked for.
    """
    from tasks import stages
    from tasks.ledger import Ledger
    from tasks.ledger.runs import find

    context = get_current_context()
    deployment = settings.current()
    try:
        with Ledger(deployment.database_url(), deployment.sql) as ledger:
            frozen = find(ledger, name_of_run(context))
            at = _day_of(context)
            if frozen is None:
                asked = _asked(context, read, by_hand)
                frozen = stages.freeze(ledger, name_of_run(context), asked, at, deployment)
            else:
                _compare(frozen, context, read)
                frozen = stages.started_again(ledger, frozen, at)
    except StageError as error:
        answer(error, context)
    show_links(context)
    return {
        "run": frozen.run_id,
        "release_id": frozen.pins["release_id"],
        "commit": frozen.pins["commit"],
        "deadline": frozen.deadline.isoformat(),
        "spec": frozen.spec.model_dump(mode="json"),
    }


def _asked(context: Any, read: Read, by_hand: type[BaseModel] | None) -> RunSpec:
    from tasks.preflight import check_spec

    source, conf = f"the conf of run {context['dag_run'].run_id}", context["dag_run"].conf or {}
    required = by_hand.model_fields.items() if by_hand is not None else ()
    if missing := [name for name, field in required if field.is_required() and name not in conf]:
        raise InputError(
            f"{source} does not name {', '.join(missing)}: the form holds an example there, which stands for nothing"
        )
    asked = read(dict(context["params"]), source)
    settings.current().queue_of(asked.node)
    check_spec(asked, settings.current())
    return asked


def _day_of(context: Any) -> datetime:
    """The run's moment on the wall where its schedule is. A run of the REST API has no logical date."""
    run, dag = context["dag_run"], context["dag"]
    # Of a DAG without a start date, the DAG's own time zone is the deployment's.
    zone = getattr(dag.timetable, "timezone", dag.timezone)
    moment: datetime = run.logical_date or run.run_after
    return moment.astimezone(ZoneInfo(zone) if isinstance(zone, str) else zone)


def _compare(frozen: "Run", context: Any, read: Read) -> None:
    """Say what differs of a run that is started again, to whoever wonders why it does not do what the file says.

    Raises:
        InputError: it has ended and was not cleared: another DAG run had its id, and was asked for something else.
    """
    from tasks import stages

    try:
        now = read(dict(context["params"]), f"what the DAG of run {frozen.run_id} says now")
        differing = ", ".join(stages.what_differs(frozen, now))
    except InputError as error:
        differing = f"everything, for it would be refused today: {error}"
    if differing and frozen.verdict is not None and not context["dag_run"].clear_number:
        raise InputError(
            f"run {frozen.run_id} of the ledger has ended, and it was started with another spec (today differs: "
            f"{differing}). A DAG run that was deleted had the id of this one, and a run keeps its spec: start what is "
            f"asked now under another run id (a night: delete this DAG run and trigger the DAG with that night's "
            f"logical date), or clear this one to go on with the old spec"
        )
    if differing:
        log.warning("run %s keeps the spec that it started with; today differs: %s", frozen.run_id, differing)


def stage(name: str, node: str | None = None) -> Any:
    """The task that executes stage `name` of the run.

    Args:
        node: whose queue a stage goes to that acts on the node; None: the default queue.
    """
    place = {"queue": node} if node and STAGES[name].on_the_node else {}

    @task(task_id=name, retries=RETRIES, retry_delay=RETRY_DELAY, doc_md=STAGES[name].says, **place)
    def execute() -> dict[str, Any]:
        from tasks import stages

        context = get_current_context()
        show_links(context)
        try:
            settled = impatient_settings()
            return vars(stages.execute(name, name_of_run(context), settings=settled, comes_back=True))
        except StageError as error:
            answer(error, context)

    return with_links(execute())


def with_links(executed: Any) -> Any:
    """The task of a decorated function, with the links that its name has."""
    executed.operator.operator_extra_links = LINKS.get(executed.operator.task_id, ())
    return executed


@task(
    retries=RETRIES,
    retry_delay=RETRY_DELAY,
    doc_md="Keeps a failed run failed: teardowns that succeed would hide it.",
)
def judge() -> str:
    """Close the run in the ledger and say how it went; fails when any of its tasks failed, or never ran."""
    from airflow.sdk.exceptions import AirflowFailException

    from tasks import stages
    from tasks.ledger import Ledger
    from tasks.ledger.runs import known

    context = get_current_context()
    instance: RuntimeTaskInstanceProtocol = context["ti"]
    states = instance.get_task_states(dag_id=instance.dag_id, run_ids=[instance.run_id])[instance.run_id]
    failed = sorted(name for name, state in states.items() if state in ("failed", "upstream_failed"))
    unfinished = sorted(name for name, state in states.items() if state == "skipped")
    deployment = settings.current()
    try:
        with Ledger(deployment.database_url(), deployment.sql) as ledger:
            name = name_of_run(context)
            before = known(ledger, name)
            if "freeze" in failed + unfinished and before is not None and before.verdict is not None:
                verdict = before.verdict  # nothing was begun now, and how it ended before stays true
            else:
                verdict = stages.close(ledger, name, succeeded=not (failed or unfinished))
    except StageError as error:
        answer(error, context)
    if failed or unfinished:
        raise AirflowFailException(
            f"the run failed: {', '.join(failed + unfinished)} did not succeed; see their logs"
        )
    return verdict


def name_of_run(context: Any) -> str:
    """The name of the task's run in the ledger."""
    return run_name(context["dag_run"].dag_id, context["dag_run"].run_id)


def impatient_settings() -> "Settings":
    """The deployment's settings for a task: Airflow waits for other runs, and does so without a slot."""
    patient = settings.current()
    names = ("batch_wait_s", "weights_wait_s", "lease_wait_s")
    waits = {name: min(_HOLDS_THE_SLOT_S, getattr(patient, name)) for name in names}
    # Its place in line is kept while it is away.
    waits["lease_place_s"] = max(patient.lease_place_s, 3 * patient.wait_step_s)
    return patient.model_copy(update=waits)


def answer(error: StageError, context: Any) -> NoReturn:
    """Raise what makes Airflow do the right thing, with the message alone: a traceback would bury it."""
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowRescheduleException

    if isinstance(error, Busy) and (waited := _waited(context)) < (limit := _wait_limit(context)):
        step = timedelta(seconds=settings.current().wait_step_s)
        log.info("%s [waiting, %s of at most %s so far]", error, waited, limit)
        raise AirflowRescheduleException(datetime.now(UTC) + step)
    if isinstance(error, Busy):
        raise AirflowFailException(f"{error} [limits.wait is over]") from None
    if error.remedy is Remedy.RETRY:
        raise AirflowException(f"{error} [a retry can help]") from None
    raise AirflowFailException(f"{error} [a retry does not help: {error.remedy.value}]") from None


def _waited(context: Any) -> timedelta:
    since = context["ti"].get_first_reschedule_date(context)
    return timedelta(0) if since is None else datetime.now(UTC) - since


def _wait_limit(context: Any) -> timedelta:
    """Of the run as it was frozen: the params are what its DAG says today."""
    from tasks.ledger import Ledger
    from tasks.ledger.runs import find

    deployment = settings.current()
    try:
        with Ledger(deployment.database_url(), deployment.sql, patience_s=10.0) as ledger:
            run = find(ledger, name_of_run(context))
    except StageError as error:
        log.warning("how long this run may wait is not known now: %s", error)
        run = None
    return timedelta(seconds=(Limits() if run is None else run.spec.limits).wait_s)
