"""Workers of a run in the Airflow UI: their states and the newest lines of their logs.

Tasks that start or use workers carry a link here. The lines come from the pool's keeper while it lives (it is
asked with the pool's key, which stays in this process), afterwards from the files of the node, when this is it.
"""

from html import escape
from typing import Any

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import requires_access_view
from airflow.plugins_manager import AirflowPlugin
from fastapi import Depends, FastAPI
from fastapi.responses import HTMLResponse
from worker_link import PREFIX, WorkersLink

_LINES = 200
_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 1.5rem; color: #1f2430; background: #fff; }
h2 { font-size: 1rem; margin: 1.5rem 0 .4rem; } .dim { color: #778; } .failed { color: #b3261e; }
pre { overflow: auto; max-height: 30rem; padding: .8rem; background: #f4f5f8; font-size: 12px; }
@media (prefers-color-scheme: dark) { body { color: #e4e6eb; background: #16181d; } pre { background: #22252c; } }
"""

app = FastAPI(title="workers", dependencies=[Depends(requires_access_view(AccessView.PLUGINS))])


@app.get("/{run_id}", response_class=HTMLResponse)
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
            sections = [_section(ledger, run_id, worker, deployment) for worker in _with_keeper(workers)]
    except StageError as error:
        sections = [f"<p class=failed>{escape(str(error))}</p>"]
    body = "".join(sections) or "<p class=dim>This run has had no worker yet.</p>"
    head = f"<h1>{escape(run_id)}</h1>"
    return f"<!doctype html><title>Workers</title><style>{_STYLE}</style>{head}{body}"


def _with_keeper(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keeper = {"worker_id": "keeper", "state": "", "evidence": "", "attempt": 0}
    return [*workers, keeper] if workers else []


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
    fastapi_apps = [{"app": app, "url_prefix": PREFIX, "name": "workers of a run"}]
    operator_extra_links = [WorkersLink()]
