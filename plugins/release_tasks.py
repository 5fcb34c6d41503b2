"""What the DAG of a release has besides stages: its form, its start, and its announcement."""

from typing import Any

from airflow.sdk import Asset, Param, get_current_context, task
from pipeline_tasks import RETRIES, RETRY_DELAY, answer, name_of_run

from tasks.errors import StageError
from tasks.spec import params
from tasks.spec.release import ReleaseSpec

RELEASE = Asset("qwen_release")
"""Updated with each release; the event's extra holds its id, path and metrics."""


def release_spec_params() -> dict[str, Param]:
    """One Param for each top-level field of the spec, each with its JSON schema."""
    return {
        name: Param(first_value, **schema)
        for name, (first_value, schema) in params.fields(ReleaseSpec).items()
    }


@task(retries=RETRIES, retry_delay=RETRY_DELAY, doc_md="Resolve revision and versions once for this run.")
def freeze_release() -> dict[str, Any]:
    """Start a run that makes a release and nothing else."""
    from tasks import settings, stages
    from tasks.ledger import Ledger
    from tasks.spec.release import parse_release

    context = get_current_context()
    deployment = settings.current()
    run = context["dag_run"]
    at = run.logical_date or run.run_after
    try:
        asked = parse_release(dict(context["params"]), source=f"the conf of run {run.run_id}")
        with Ledger(deployment.database_url(), deployment.sql) as ledger:
            frozen = stages.freeze(ledger, name_of_run(context), asked, at, deployment)
    except StageError as error:
        answer(error, context)
    return {"run": frozen.run_id, "release_id": frozen.pins["release_id"], "commit": frozen.pins["commit"]}


@task(outlets=[RELEASE], doc_md="Tell whoever waits for it that the release is there.")
def announce(converted: dict[str, Any]) -> dict[str, Any]:
    """An asset event with what `convert` found in the store."""
    facts: dict[str, Any] = converted["facts"]
    get_current_context()["outlet_events"][RELEASE].extra = facts
    return facts
