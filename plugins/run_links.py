"""Links from tasks to the pages of their run. Apart from the pages, because DAG files import them.

Airflow works a link out when its task ends; what is of use before that is shown as soon as the task begins.
"""

from typing import Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink
from run_name import run_name

from tasks import settings

PREFIX = "/qwen-pipeline-workers"
"""Where `worker_logs` serves its page."""

RUNS = "/qwen-pipeline-runs"
"""Where `run_pages` serves its pages."""


class WorkersLink(BaseOperatorLink):
    """From a task to the page of its run's workers."""

    @property
    def name(self) -> str:
        """What the button says."""
        return "Workers and their logs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The page of the run that the task belongs to."""
        return f"{PREFIX}/{_run(ti_key)}"


class SparkLink(BaseOperatorLink):
    """From the task that asks the rows to Spark's own page."""

    @property
    def name(self) -> str:
        """What the button says."""
        return "Spark UI"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Leads on to wherever Spark's page is; no link where it has none."""
        deployment = settings.current()
        has_page = deployment.spark_history or deployment.spark_has_ui
        return f"{RUNS}/{_run(ti_key)}/spark" if has_page else ""


class AnswersLink(BaseOperatorLink):
    """From the task that publishes to what is published."""

    @property
    def name(self) -> str:
        """What the button says."""
        return "Output"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The page of the run's output."""
        return f"{RUNS}/{_run(ti_key)}/output"


class ReportLink(BaseOperatorLink):
    """From a task to what its run did: rows, tokens, time."""

    @property
    def name(self) -> str:
        """What the button says."""
        return "Report"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The page of the run's report."""
        return f"{RUNS}/{_run(ti_key)}/report"


LINKS: dict[str, tuple[BaseOperatorLink, ...]] = {
    "freeze": (ReportLink(),),
    "start": (WorkersLink(),),
    "keep": (WorkersLink(),),
    "run": (WorkersLink(), SparkLink()),
    "stop": (WorkersLink(),),
    "publish": (AnswersLink(), ReportLink()),
    "judge": (ReportLink(),),
}
"""By task."""


def show_links(context: Any) -> None:
    """Show the links of the task that is running, now."""
    instance = context["ti"]
    for link in LINKS.get(instance.task_id, ()):
        instance.xcom_push(key=link.xcom_key, value=link.get_link(None, ti_key=instance))


def _run(ti_key: Any) -> str:
    return quote(run_name(ti_key.dag_id, ti_key.run_id), safe="")
