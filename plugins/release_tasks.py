"""What the DAG of a release has besides stages: its announcement."""

from typing import Any

from airflow.sdk import Asset, get_current_context, task
from pipeline_tasks import RETRIES, RETRY_DELAY

RELEASE = Asset("qwen_release")
"""Updated with each release; the event's extra holds its id, path and metrics."""


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
