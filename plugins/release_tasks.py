"""What the DAG of a release has besides stages: its start and its announcement."""

from typing import Any

from airflow.sdk import Asset, get_current_context, task
from pipeline_tasks import RETRIES, RETRY_DELAY, start_run

RELEASE = Asset("qwen_release")
"""Updated with each release; the event's extra holds its id, path and metrics."""


@task(retries=RETRIES, retry_delay=RETRY_DELAY, doc_md="Resolve revision and versions once for this run.")
def freeze_release() -> dict[str, Any]:
    """Start a run that makes a release and nothing else."""
    from tasks.spec.release import ReleaseSpec, parse_release

    return start_run(parse_release, by_hand=ReleaseSpec)


@task(
    outlets=[RELEASE],
    retries=RETRIES,
    retry_delay=RETRY_DELAY,
    doc_md="Tell whoever waits for it that the release is there.",
)
def announce(converted: dict[str, Any]) -> dict[str, Any]:
    """An asset event with what `convert` found in the store."""
    facts: dict[str, Any] = converted["facts"]
    get_current_context()["outlet_events"][RELEASE].extra = facts
    return facts
