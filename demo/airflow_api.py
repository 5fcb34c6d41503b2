"""A client for what the demo asks of Airflow's REST API (v2)."""

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import httpx

from tasks.errors import InputError, StageFailed, Unavailable

_TRIES = 5
"""Of a request that found nobody listening or lost its connection; the API server may be restarting."""


@dataclass(frozen=True)
class DagRun:
    """One run; `state` is queued, running, success or failed."""

    dag_id: str
    run_id: str
    state: str
    start: datetime | None
    end: datetime | None

    @property
    def finished(self) -> bool:
        return self.state in ("success", "failed")


@dataclass(frozen=True)
class TaskInstance:
    """One task of a run; `state` is None until it is scheduled, `map_index` -1 unless the task is mapped."""

    task_id: str
    map_index: int
    state: str | None
    try_number: int
    start: datetime | None
    end: datetime | None


class AirflowApi:
    """One user's session with the API server at `url`; logs in when it must."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self.url = url
        self._user = user
        self._password = password
        self._token: str | None = None
        self._http = httpx.Client(base_url=url, timeout=30.0, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def health(self) -> dict[str, Any]:
        """By component: its status and, for the three with a heartbeat, when it last beat. Needs no login.

        Raises:
            Unavailable: the API server does not answer (yet); this is not tried again here.
        """
        try:
            answer = self._http.get("/api/v2/monitor/health", timeout=5.0)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise Unavailable(f"Airflow's API server at {self.url} does not answer: {error}") from None
        health: dict[str, Any] = answer.json()
        return health

    def prepare_for_tasks(self) -> None:
        """Make the API server build the API for tasks, which it puts off until the first request of a task.

        Takes seconds the first time, and nothing after. Needs no login.
        """
        with suppress(httpx.HTTPError):
            self._http.get("/execution/health", timeout=120.0)

    def unpause(self, dag_id: str) -> None:
        """New DAGs are paused: their runs stay queued."""
        self._ask("PATCH", f"/api/v2/dags/{dag_id}", json={"is_paused": False})

    def pass_task(self, dag_id: str, run_id: str, task_id: str) -> None:
        """Mark one task as success: what is below it goes on."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        self._ask("PATCH", path, json={"new_state": "success"})

    def links(self, dag_id: str, run_id: str, task_id: str) -> dict[str, str | None]:
        """The extra links of a task: what the button says, and where it leads."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/links"
        found: dict[str, str | None] = self._ask("GET", path)["extra_links"]
        return found

    def page(self, place: str) -> httpx.Response:
        """A page of a plugin, as the browser of who is logged in gets it; redirections are not followed."""
        return self._send("GET", place, None, None)

    def asset_events(self) -> list[dict[str, Any]]:
        """The newest events of assets: `name`, `uri`, `extra`, `source_run_id`."""
        found: list[dict[str, Any]] = self._ask("GET", "/api/v2/assets/events")["asset_events"]
        return found

    def trigger(self, dag_id: str, conf: dict[str, Any], run_id: str | None = None) -> DagRun:
        """Start a run of `dag_id` with the params `conf`.

        Raises:
            InputError: `conf` does not fit the DAG's params (says where), or there is a run of that id.
        """
        body: dict[str, Any] = {"logical_date": None, "conf": conf}
        if run_id is not None:
            body["dag_run_id"] = run_id
        return _dag_run(self._ask("POST", f"/api/v2/dags/{dag_id}/dagRuns", json=body))

    def dag_run(self, dag_id: str, run_id: str) -> DagRun:
        return _dag_run(self._ask("GET", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}"))

    def fail(self, dag_id: str, run_id: str) -> None:
        """Mark a run as failed: running tasks are ended, teardowns still run."""
        self._ask("PATCH", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}", json={"state": "failed"})

    def fail_task(self, dag_id: str, run_id: str, task_id: str) -> None:
        """Mark one task as failed: if it runs it is ended."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        self._ask("PATCH", path, json={"new_state": "failed"})

    def clear(self, dag_id: str, run_id: str) -> None:
        """Clear a whole run: what runs is ended, everything runs again."""
        body = {"dry_run": False, "only_failed": False}
        self._ask("POST", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/clear", json=body)

    def clear_task(self, dag_id: str, run_id: str, task_id: str) -> None:
        """Clear one task and what is below it, as the UI does."""
        body = {
            "dry_run": False,
            "only_failed": False,
            "dag_run_id": run_id,
            "task_ids": [task_id],
            "include_downstream": True,
        }
        self._ask("POST", f"/api/v2/dags/{dag_id}/clearTaskInstances", json=body)

    def task_instances(self, dag_id: str, run_id: str) -> list[TaskInstance]:
        """The tasks of a run; the first 1,000."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances"
        answer = self._ask("GET", path, params={"limit": "1000"})
        return [
            TaskInstance(
                task_id=found["task_id"],
                map_index=found["map_index"],
                state=found["state"],
                try_number=found["try_number"],
                start=_time(found["start_date"]),
                end=_time(found["end_date"]),
            )
            for found in answer["task_instances"]
        ]

    def xcom(
        self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", *, map_index: int = -1
    ) -> Any:
        """What a task returned, or pushed under `key`; None when there is nothing."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        answer = self._ask(
            "GET", path, params={"map_index": str(map_index), "deserialize": "true"}, absent_is_none=True
        )
        return None if answer is None else answer["value"]

    def wait_for_dag(self, dag_id: str, *, parsed_after: datetime, deadline_s: float = 60.0) -> None:
        """Return when `dag_id` is known from a parse after `parsed_after`: an older one may be of other code.

        Raises:
            StageFailed: its file does not import (with the traceback), or nothing parsed it in time.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            found = self._ask("GET", f"/api/v2/dags/{dag_id}", absent_is_none=True)
            parsed = _time(found["last_parsed_time"]) if found else None
            if parsed is not None and parsed > parsed_after and not found["has_import_errors"]:
                return
            errors = self._ask("GET", "/api/v2/importErrors")["import_errors"]
            recent = [
                error for error in errors if (_time(error["timestamp"]) or parsed_after) >= parsed_after
            ]
            if recent:
                raise StageFailed(
                    f"Airflow cannot import {recent[0]['filename']}:\n{recent[0]['stack_trace'].strip()}"
                )
            if time.monotonic() > deadline:
                raise StageFailed(
                    f"Airflow did not read the DAG {dag_id} within {deadline_s:.0f} s; the log of its DAG "
                    f"processor says which files it looks at"
                )
            time.sleep(0.5)

    def _ask(
        self,
        method: str,
        path: str,
        *,
        json: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
        absent_is_none: bool = False,
    ) -> Any:
        """The JSON of the answer.

        Raises:
            InputError: Airflow refuses what was asked (400, 409, 422).
            Unavailable: nobody answers, also not after some tries.
            StageFailed: any other refusal.
        """
        answer = self._send(method, path, json, params)
        if answer.status_code == 401:
            self._token = None  # it is older than a day, or of a server with another secret
            answer = self._send(method, path, json, params)
        if answer.is_success:
            return answer.json()
        if answer.status_code == 404 and absent_is_none:
            return None
        if answer.status_code == 409:
            raise InputError(f"what {method} {path} would make is there already: {json}")
        said = f"Airflow refused {method} {path} with {answer.status_code}: {_detail(answer)}"
        raise InputError(said) if answer.status_code in (400, 422) else StageFailed(said)

    def _send(
        self, method: str, path: str, json: dict[str, Any] | None, params: dict[str, str] | None
    ) -> httpx.Response:
        for left in reversed(range(_TRIES)):
            try:
                if self._token is None:
                    self._token = self._log_in()
                return self._http.request(
                    method, path, json=json, params=params, headers={"Authorization": f"Bearer {self._token}"}
                )
            except httpx.TransportError as error:
                # A POST that was sent may have been done: only one that was never sent is repeated.
                repeatable = method != "POST" or isinstance(error, httpx.ConnectError)
                if not left or not repeatable:
                    raise Unavailable(
                        f"Airflow's API server at {self.url} does not answer {method} {path}: {error}"
                    ) from None
                time.sleep(0.5)
        raise AssertionError("the last try returns or raises")

    def _log_in(self) -> str:
        answer = self._http.post("/auth/token", json={"username": self._user, "password": self._password})
        if answer.status_code != 201:
            raise StageFailed(
                f"Airflow refused the login of {self._user} with {answer.status_code}: {_detail(answer)}"
            )
        token: str = answer.json()["access_token"]
        return token


def _dag_run(answer: dict[str, Any]) -> DagRun:
    return DagRun(
        dag_id=answer["dag_id"],
        run_id=answer["dag_run_id"],
        state=answer["state"],
        start=_time(answer["start_date"]),
        end=_time(answer["end_date"]),
    )


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
