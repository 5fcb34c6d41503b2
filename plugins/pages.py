"""Pages in the Airflow UI whose application is made when the first of them is asked for.

Every process of Airflow loads every plugin, a task's and a DAG parser's too. FastAPI with Airflow's own API takes each
of them two seconds of a core, and none but the API server needs it.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import cache
from typing import Any

Message = MutableMapping[str, Any]
Asgi = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


def pages(title: str, routes: Mapping[str, Callable[..., Any]]) -> Asgi:
    """An ASGI application with a page for each path.

    Plugin applications are open to everybody unless they say otherwise: these ask for the right to see plugins.

    Args:
        routes: by path, with path parameters as FastAPI writes them; what returns HTML, or a response.
    """

    @cache
    def made() -> Asgi:
        from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
        from airflow.api_fastapi.core_api.security import requires_access_view
        from fastapi import Depends, FastAPI
        from fastapi.responses import HTMLResponse

        app = FastAPI(title=title, dependencies=[Depends(requires_access_view(AccessView.PLUGINS))])
        for path, page in routes.items():
            app.get(path, response_class=HTMLResponse, response_model=None)(page)
        return app

    async def app(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        await made()(scope, receive, send)

    return app
