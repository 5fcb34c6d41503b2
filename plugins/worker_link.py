"""The link from a task to the logs of its run's workers. Apart from the page, because DAG files import it."""

from typing import Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink
from run_name import run_name

PREFIX = "/qwen-pipeline-workers"
"""Where `worker_logs` serves the page."""


class WorkersLink(BaseOperatorLink):
    """From a task to the page of its run's workers."""

    @property
    def name(self) -> str:
        """What the button says."""
        return "Workers and their logs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The page of the run that the task belongs to."""
        return f"{PREFIX}/{quote(run_name(ti_key.dag_id, ti_key.run_id), safe='')}"
