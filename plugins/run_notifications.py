"""Who is told how a run ended, or that it is late: Airflow's notifiers, as the setting `notify` lists them."""

from importlib import import_module
from typing import Any

from tasks import settings


def notifications() -> dict[str, Any]:
    """The callbacks of a DAG; none unless the deployment lists some. Of deadlines, see `deadline_alert`.

    The notifiers' arguments are templates: `{{ dag_run.run_id }}` and the like are filled in when they are sent.
    """
    return {f"on_{event}_callback": notifiers(event) or None for event in ("failure", "success")}


def notifiers(event: str) -> list[Any]:
    """Those who want to know of it, ready to be called."""
    wanted = settings.current().notify
    return [_class(one.notifier)(**one.arguments) for one in wanted if event in one.on]


def _class(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
