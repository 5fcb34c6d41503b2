"""What Airflow does when a run has ended: it tells whoever the setting `notify` lists, by Airflow's notifiers."""

from importlib import import_module
from typing import Any

from run_closing import close_what_failed

from tasks import settings


def notifications() -> dict[str, Any]:
    """The callbacks of a DAG of runs; nobody is told unless the deployment lists some. Deadlines: `deadline_alert`.

    The notifiers' arguments are templates: `{{ dag_run.run_id }}` and the like are filled in when they are sent.
    """
    return {
        "on_failure_callback": [close_what_failed, *notifiers("failure")],
        "on_success_callback": notifiers("success") or None,
    }


def notifiers(event: str) -> list[Any]:
    """Those who want to know of it, ready to be called."""
    wanted = settings.current().notify
    return [_class(one.notifier)(**one.arguments) for one in wanted if event in one.on]


def _class(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
