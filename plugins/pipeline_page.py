"""The pipeline's page in the Airflow UI: the newest runs with their stages, from the ledger."""

from html import escape
from typing import Any
from urllib.parse import quote

from airflow.plugins_manager import AirflowPlugin
from deadline_alert import BeforeTheDeadline
from html_page import document, said
from pages import pages
from run_links import RUNS

_PREFIX = "/qwen-pipeline"


def page() -> str:
    """The newest runs, newest first."""
    from tasks import settings
    from tasks.cli.status import stages_of
    from tasks.errors import StageError
    from tasks.ledger import Ledger

    deployment = settings.current()
    try:
        with Ledger(deployment.database_url(), deployment.sql, patience_s=2.0) as ledger:
            with ledger.transaction() as connection:
                runs = list(ledger.queries.newest_runs(connection, limit=10))
            sections = [_run(run, stages_of(ledger, run["run_id"])) for run in runs]
    except StageError as error:
        sections = [said(error)]
    body = "".join(sections) or "<p class=dim>No run has been started yet: trigger the DAG qwen_batch.</p>"
    return document("Pipeline", body)


def _run(run: dict[str, Any], stages: list[dict[str, Any]]) -> str:
    rows = "".join(_stage(stage) for stage in stages)
    state = run["verdict"] or "open"
    return (
        f"<h2><a href='{RUNS}/{quote(run['run_id'], safe='')}/report'>{escape(run['run_id'])}</a> "
        f"<span class={state}>{state}</span> "
        f"<span class=dim>{escape(run['tenant'])} on {escape(run['node'])}, "
        f"started {run['started_at']:%Y-%m-%d %H:%M} UTC</span></h2>"
        f"<table class=wide><tr><th>stage<th>state<th>seconds<th>progress<th>what was found</tr>{rows}</table>"
    )


def _stage(stage: dict[str, Any]) -> str:
    state = stage["outcome"] or "working"
    ended = stage["ended_at"]
    seconds = f"{(ended - stage['claimed_at']).total_seconds():.1f}" if ended else ""
    progress = f"{stage['done']:,}/{stage['total']:,} {stage['unit']}" if stage["done"] is not None else ""
    cells = (stage["stage"], state, seconds, progress, stage["message"] or "")
    return f"<tr class={'failed' if state in ('failed', 'fenced') else ''}><td>" + "<td>".join(
        map(escape, cells)
    )


class PipelinePlugin(AirflowPlugin):
    """Puts the page into the navigation, and makes the deadline of a run known to the scheduler."""

    name = "qwen_pipeline"
    deadline_references = [BeforeTheDeadline]
    fastapi_apps = [
        {"app": pages("qwen pipeline", {"/": page}), "url_prefix": _PREFIX, "name": "qwen pipeline"}
    ]
    external_views = [
        {"name": "Pipeline", "href": f"{_PREFIX}/", "url_route": "qwen-pipeline", "destination": "nav"}
    ]
