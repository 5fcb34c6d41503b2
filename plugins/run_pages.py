"""Pages of one run in the Airflow UI: its report, its output, and the way to Spark's own page.

What is published is described, not shown: who may look at Airflow need not be allowed to read the answers.
"""

from html import escape
from pathlib import Path
from typing import Any

from airflow.plugins_manager import AirflowPlugin
from html_page import document, said
from pages import pages
from run_links import RUNS, AnswersLink, ReportLink, SparkLink

_WIDEST_BAR_EM = 24.0
_ROWS = ("rows", "answered", "failed", "not_started", "prompt_tokens", "completion_tokens", "rows_per_s")


def report_page(run_id: str) -> str:
    """Rows, tokens and time of a run, and its spec with every date resolved."""
    from tasks import settings
    from tasks.cli.report import report
    from tasks.errors import StageError

    try:
        found, _ = report(settings.current(), run_id)
    except StageError as error:
        return document("Report", said(error))
    return document("Report", _report(found))


def output_page(run_id: str) -> str:
    """The files that the run's manifest names."""
    from tasks import settings
    from tasks.cli.report import report
    from tasks.errors import StageError

    try:
        found, _ = report(settings.current(), run_id)
    except StageError as error:
        return document("Output", said(error))
    return document("Output", f"<h1>Output of {escape(run_id)}</h1>{_output(found)}")


def spark_page(run_id: str) -> Any:
    """Leads on to the application's page while it runs, and to the history afterwards."""
    from fastapi.responses import RedirectResponse

    from tasks import settings
    from tasks.cli.status import stages_of
    from tasks.errors import StageError
    from tasks.ledger import Ledger

    deployment = settings.current()
    try:
        with Ledger(deployment.database_url(), deployment.sql, patience_s=2.0) as ledger:
            stages = stages_of(ledger, run_id)
    except StageError as error:
        return document("Spark", said(error))
    working = [one["detail"] or {} for one in stages if one["stage"] == "run" and one["outcome"] is None]
    if place := next((one["spark_ui"] for one in working if one.get("spark_ui")), deployment.spark_history):
        return RedirectResponse(place)
    text = "<p class=dim>No Spark application of this run is running, and no history is kept"
    return document("Spark", f"{text} (QWEN_PIPELINE_SPARK_HISTORY).</p>")


def _report(found: dict[str, Any]) -> str:
    numbers = "".join(
        f"<tr><th>{name.replace('_', ' ')}<td class=number>{_number(found[name])}" for name in _ROWS
    )
    seconds: dict[str, float] = found["seconds"]
    longest = max(seconds.values(), default=0.0) or 1.0
    bars = "".join(
        f"<tr><td>{escape(stage)}<td class=number>{spent:,.1f} s"
        f"<td><span class=bar style='width:{_WIDEST_BAR_EM * spent / longest:.2f}em'></span>"
        for stage, spent in seconds.items()
    )
    return (
        f"<h1>{escape(found['run'])} <span class={found['verdict']}>{found['verdict']}</span></h1>"
        f"<p class=dim>started {found['started']}, due {found['deadline']}, release "
        f"{escape(str(found['release']))}</p>"
        f"<h2>Rows and tokens</h2><table>{numbers}</table>"
        f"<h2>Time by stage</h2><table>{bars}</table>"
        f"<h2>Output</h2>{_output(found)}<h2>Spec, as frozen</h2><pre>{escape(found['spec'])}</pre>"
    )


def _output(found: dict[str, Any]) -> str:
    from tasks.batch import published

    if found["output"] is None:
        return "<p class=dim>Nothing of this run is published yet.</p>"
    folder = Path(found["output"])
    manifest = published.manifest_of(folder, found["batch"])
    if manifest is None:
        return f"<p><code>{escape(str(folder))}</code></p><p class=dim>It cannot be read from this host.</p>"
    files = "".join(
        f"<tr><td><code>{escape(item['name'])}</code><td class=number>{item['rows']:,}"
        f"<td class=number>{item['bytes']:,}<td><code>{item['sha256'][:12]}</code>"
        for item in manifest["files"]
    )
    part = f", {manifest['not_started']:,} not started" if manifest["partial"] else ""
    return (
        f"<p><code>{escape(str(folder / manifest['version']))}</code>: {manifest['answered']:,} answered, "
        f"{manifest['failed']:,} failed{part}</p>"
        f"<table><tr><th>file<th>rows<th>bytes<th>sha256</tr>{files}</table>"
    )


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


_ROUTES = {
    "/{run_id}/report": report_page,
    "/{run_id}/output": output_page,
    "/{run_id}/spark": spark_page,
}


class RunPagesPlugin(AirflowPlugin):
    """Serves the pages; the links are on the tasks themselves."""

    name = "qwen_pipeline_runs"
    fastapi_apps = [{"app": pages("runs", _ROUTES), "url_prefix": RUNS, "name": "pages of a run"}]
    operator_extra_links = [AnswersLink(), ReportLink(), SparkLink()]
