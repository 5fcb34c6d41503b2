"""Who is told how a run ended: Airflow's notifiers, as the setting `notify` lists them."""

from importlib import import_module
from typing import Any

from tasks import settings


def notifications() -> dict[str, Any]:
    """The callbacks of a DAG; none unless the deployment lists some.

    The notifiers' arguments are templates: `{{ dag_run.run_id }}` and the like are filled in when they are sent.
    """
    wanted = settings.current().notify
    return {
        f"on_{event}_callback": [_class(one.notifier)(**one.arguments) for one in wanted if event in one.on]
        or None
        for event in ("failure", "success")
    }


def _class(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
