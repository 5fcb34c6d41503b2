"""Workers of a run in the Airflow UI: their states and the newest lines of their logs.

Tasks that start or use workers carry a link here. The lines come from the pool's keeper while it lives (it is
asked with the pool's key, which stays in this process), afterwards from the files of the node, when this is it.
"""

from html import escape
from typing import Any

from airflow.plugins_manager import AirflowPlugin
from html_page import document, said
from pages import pages
from run_links import PREFIX, WorkersLink

_LINES = 200


def page(run_id: str) -> str:
    """All workers of the run's newest pool, and its keeper."""
    from tasks import settings
    from tasks.cli.workers import workers_of
    from tasks.errors import StageError
    from tasks.ledger import Ledger

    deployment = settings.current()
    try:
        with Ledger(deployment.database_url(), deployment.sql, patience_s=2.0) as ledger:
            workers = workers_of(ledger, run_id)
            sections = [_endpoints(ledger, run_id, deployment)] if workers else []
            sections += [_section(ledger, run_id, worker, deployment) for worker in _with_keeper(workers)]
    except StageError as error:
        sections = [said(error)]
    body = "".join(sections) or "<p class=dim>This run has had no worker yet.</p>"
    return document("Workers", f"<h1>{escape(run_id)}</h1>{body}")


def _with_keeper(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keeper = {"worker_id": "keeper", "state": "", "evidence": "", "attempt": 0}
    return [*workers, keeper] if workers else []


def _endpoints(ledger: Any, run_id: str, deployment: Any) -> str:
    """Where the pool can be asked while it is open. Its key is nowhere here: whoever may have it can work it out."""
    from tasks.cli.endpoints import endpoints
    from tasks.errors import StageError

    try:
        found = endpoints(ledger, run_id, deployment)
    except StageError as error:
        return f"<p class=dim>{escape(str(error))}</p>"
    rows = "".join(
        f"<tr><td><code>{escape(one['url'])}</code><td>{escape(one['state'])}" for one in found["endpoints"]
    )
    command = f"qwen-pipeline endpoints --run '{run_id}' --key-file pool.key"
    return (
        f"<h2>To query it</h2><table><tr><th>OpenAI endpoint<th>state</tr>{rows}</table>"
        f"<p>model <code>{escape(found['model'])}</code></p>"
        f"<p>key: on a host of this deployment, <code>{escape(command)}</code></p>"
    )


def _section(ledger: Any, run_id: str, worker: dict[str, Any], deployment: Any) -> str:
    from tasks.cli.workers import read_log
    from tasks.errors import StageError

    try:
        lines = read_log(ledger, run_id, worker["worker_id"], _LINES, deployment)
    except StageError as error:
        lines = str(error)
    start = f"start {worker['attempt']}: " if worker["attempt"] else ""
    return (
        f"<h2>{escape(worker['worker_id'])} {escape(worker['state'])} "
        f"<span class=dim>{start}{escape(worker['evidence'])}</span></h2><pre>{escape(lines)}</pre>"
    )


class WorkerLogsPlugin(AirflowPlugin):
    """Serves the page; the link is on the tasks themselves."""

    name = "qwen_pipeline_workers"
    fastapi_apps = [
        {"app": pages("workers", {"/{run_id}": page}), "url_prefix": PREFIX, "name": "workers of a run"}
    ]
    operator_extra_links = [WorkersLink()]
