"""Real Airflow for the demo and the tests: four services on PostgreSQL with the LocalExecutor.

Keeps:
- Airflow's secrets (database URL, signing keys, the admin's password) are in 0600 files below `home`, never
  in an environment: what a task starts cannot inherit them.
- The four services share one configuration, so they start and end together; what a kill left of them is ended
  before a new start.
- "Healthy" means that each service has beaten its heart since this start: Airflow calls a service healthy for
  30 s after its last beat, dead or alive.
"""

import configparser
import json
import secrets
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import psycopg

from demo.airflow_api import AirflowApi
from demo.children import Children, kept_port, last_lines, write_private
from tasks.errors import StageFailed, Unavailable
from tasks.node.processes import Process

ADMIN = "admin"

SERVICES: Mapping[str, tuple[str, ...]] = {
    # The API server first: the others need it, and it takes longest.
    "api-server": ("api-server",),
    "dag-processor": ("dag-processor",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
"""Command line by service. Logs are files on this host: nobody needs them over HTTP, on a fixed port."""

_END_DEAD_TRANSACTIONS = "?options=-cidle_in_transaction_session_timeout=2min"
"""Workers of LocalExecutor live on after a scheduler that was killed, and so do its connections, of which they have
copies: with one of them the locks on runs that it looked at, and no other scheduler would ever schedule those."""

_HEARTBEATS = {"scheduler": "scheduler", "dag-processor": "dag_processor", "triggerer": "triggerer"}


@dataclass(frozen=True)
class _Started:
    """What the running services were started with."""

    digest: str
    at: datetime


class Airflow:
    """Airflow's services below `home`.

    `database_url` is libpq's, of a database that belongs to Airflow alone. `environment` is what services and
    tasks see besides PATH and the like; it holds the pipeline's settings (QWEN_PIPELINE_...).
    """

    def __init__(
        self,
        home: Path,
        children: Children,
        *,
        database_url: str,
        dags: Path,
        plugins: Path,
        environment: Mapping[str, str],
        parallelism: int = 4,
    ) -> None:
        self.home = home.absolute()
        self.logs = self.home / "logs"
        self._children = children
        self._database_url = database_url
        self._dags = dags.absolute()
        self._plugins = plugins.absolute()
        self._extra = dict(environment)
        self._parallelism = parallelism

    @property
    def url(self) -> str:
        """Where the UI and the REST API are."""
        return f"http://127.0.0.1:{(self.home / 'port').read_text()}"

    @property
    def password(self) -> str:
        """The password of the user `admin`."""
        return self._secrets()["password"]

    @property
    def started_at(self) -> datetime:
        """When the running services were started: a DAG parsed later is parsed by them."""
        started = self._started()
        if started is None:
            raise StageFailed(f"Airflow in {self.home} is not running")
        return started.at

    def api(self) -> AirflowApi:
        """A REST client, logged in as `admin`; close it, or use it in a `with`."""
        return AirflowApi(self.url, ADMIN, self.password)

    def start(self, *, deadline_s: float = 600.0) -> None:
        """Bring the database's schema up to date, start the services, return when all are healthy.

        Services that run with the same configuration are kept.

        Raises:
            StageFailed: a service ended or did not get healthy; names it and shows the end of its log.
        """
        if self._kept():
            return
        self.stop()
        self.home.mkdir(parents=True, exist_ok=True)
        for another in (False, True):
            port = kept_port(self.home / "port", another=another)
            self._configure(port)
            self.migrate()
            at = datetime.now(UTC)
            running = {service: self._launch(service) for service in SERVICES}
            try:
                self._wait_until_healthy(running, at, deadline_s)
                break
            except _PortTaken:
                self.stop()
        else:
            raise StageFailed(
                "Airflow's API server found two free ports taken when it used them; run it again"
            )
        write_private(
            self.home / "started.json", json.dumps({"digest": self._digest(), "at": at.isoformat()})
        )

    def start_again(self, service: str) -> Process:
        """Start one service that has died, as it was; one that lives is kept."""
        return self._launch(service)

    def ended(self) -> list[str]:
        """Services that do not run; they end when their database goes away, and wait for a service manager."""
        return [service for service in SERVICES if self._children.find(_part(service)) is None]

    def stop(self, *, grace_s: float = 8.0) -> None:
        """End the services and the tasks that they run.

        Raises:
            StageFailed: a process of theirs lives on.
        """
        (self.home / "started.json").unlink(missing_ok=True)
        self._children.end(*(_part(service) for service in SERVICES), grace_s=grace_s)

    def migrate(self) -> None:
        """Bring the schema of Airflow's database up to date. 4 to 11 s, or nothing when it already is.

        Raises:
            StageFailed: with the end of the log.
        """
        done = self.home / "migrated.json"
        with suppress(OSError, ValueError):
            if json.loads(done.read_text()) == self._schema():
                return
        log = self.logs / "migrate.log"
        status = self._children.run(
            _part("migrate"),
            self._command("db", "migrate"),
            environment=self._environment(),
            log=log,
            cwd=self.home,
        )
        if status != 0:
            raise StageFailed(
                f"`airflow db migrate` ended with {status}; the end of its log {log}:\n{last_lines(log)}"
            )
        write_private(done, json.dumps(self._schema()))

    def _wait_until_healthy(self, running: Mapping[str, Process], since: datetime, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        with self.api() as api:
            while waiting := _not_healthy(api, since):
                for service, process in running.items():
                    if not process.is_alive():
                        raise self._failure(service, "ended while Airflow was starting")
                if time.monotonic() > deadline:
                    raise self._failure(waiting[0], f"was not healthy after {deadline_s:.0f} s")
                if waiting[0] != "api-server":
                    api.prepare_for_tasks()  # while the others still start
                time.sleep(0.5)
            api.prepare_for_tasks()

    def _failure(self, service: str, what: str) -> StageFailed:
        log = self._log(service)
        end = last_lines(log)
        if service == "api-server" and "address already in use" in end.lower():
            return _PortTaken(end)
        return StageFailed(f"Airflow's {service} {what}; the end of its log {log}:\n{end}")

    def _launch(self, service: str) -> Process:
        log = self._log(service)
        with suppress(FileNotFoundError):
            log.replace(log.with_suffix(".log.1"))
        return self._children.start(
            _part(service),
            self._command(*SERVICES[service]),
            environment=self._environment(),
            log=log,
            cwd=self.home,
        )

    def _kept(self) -> bool:
        """Whether the services run, all of them, with the configuration that they would get now, healthy."""
        started = self._started()
        if started is None or started.digest != self._digest():
            return False
        if self.ended():
            return False
        with self.api() as api:
            return not _not_healthy(api, started.at)

    def _started(self) -> _Started | None:
        try:
            found = json.loads((self.home / "started.json").read_text())
            return _Started(found["digest"], datetime.fromisoformat(found["at"]))
        except (OSError, ValueError, KeyError):
            return None

    def _digest(self) -> str:
        """Of all that the services were given."""
        return sha256(json.dumps([self._config(0), self._environment()], sort_keys=True).encode()).hexdigest()

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "AIRFLOW_HOME": str(self.home),
            # Airflow's processes rename themselves. Without this the name is written over the environment
            # that /proc shows, and the marks of a process are gone.
            "SPT_NOENV": "1",
            **self._extra,
        }

    def _configure(self, port: int) -> None:
        write_private(self.home / "passwords.json", json.dumps({ADMIN: self.password}))
        write_private(self.home / "airflow.cfg", self._config(port))

    def _config(self, port: int) -> str:
        known = self._secrets()
        url = f"http://127.0.0.1:{port}"
        config = configparser.RawConfigParser()
        config.read_dict(
            {
                "core": {
                    "executor": "LocalExecutor",
                    "parallelism": self._parallelism,
                    "dags_folder": self._dags,
                    "plugins_folder": self._plugins,
                    "load_examples": False,
                    "fernet_key": known["fernet_key"],
                    "execution_api_server_url": f"{url}/execution/",
                    # Written here, because Airflow prints a password that it makes itself.
                    "simple_auth_manager_users": f"{ADMIN}:admin",
                    "simple_auth_manager_passwords_file": self.home / "passwords.json",
                    # The default asks the DNS for this host's name, which can take long on a laptop.
                    "hostname_callable": "socket.gethostname",
                },
                "database": {
                    # psycopg 3, which the pipeline needs anyway.
                    "sql_alchemy_conn": self._database_url.replace("postgresql:", "postgresql+psycopg:", 1)
                    + _END_DEAD_TRANSACTIONS,
                },
                "logging": {"base_log_folder": self.logs / "tasks"},
                "api": {
                    "host": "127.0.0.1",
                    "port": port,
                    "base_url": url,
                    "workers": 1,
                    "secret_key": known["api_secret_key"],
                    "instance_name": "Qwen pipeline: demo",
                },
                "api_auth": {"jwt_secret": known["jwt_secret"]},
                "workers": {
                    # How long a failing task lingers; the default is 5 s.
                    "min_heartbeat_interval": 1,
                    # A task whose first request takes longer fails. On a busy laptop 5 s, the default, is not
                    # enough.
                    "execution_api_timeout": 60,
                },
                "scheduler": {
                    # Between two looks at the database when there is nothing to do. Every task of a chain
                    # pays it once or twice; 1 s, the default, takes 5 % of a core while idle, 0.2 s 15 %.
                    "scheduler_idle_sleep_time": 0.4,
                    # A scheduler that is back within 30 s of its death does not take the dead one's tasks over
                    # when it starts, and looks again only after 300 s, the default.
                    "orphaned_tasks_check_interval": 30,
                    "enable_health_check": False,
                },
                "dag_processor": {
                    "parsing_processes": 1,
                    # Between two looks at a file that did not change. One look takes more than 1 s of a core:
                    # at 30 s, the default, five files take a fifth of one while nothing happens.
                    "min_file_process_interval": 300,
                },
                "usage_data_collection": {"enabled": False},
            }
        )
        text = StringIO()
        config.write(text)
        return text.getvalue()

    def _secrets(self) -> dict[str, str]:
        path = self.home / "secrets.json"
        if not path.exists():
            made = {name: secrets.token_urlsafe(32) for name in ("jwt_secret", "api_secret_key")}
            made["fernet_key"] = urlsafe_b64encode(secrets.token_bytes(32)).decode()
            made["password"] = secrets.token_urlsafe(12)
            write_private(path, json.dumps(made))
        known: dict[str, str] = json.loads(path.read_text())
        return known

    def _schema(self) -> dict[str, Any]:
        """What identifies the schema that is there and the code that wants it."""
        with psycopg.connect(self._database_url) as connection:
            try:
                row = connection.execute("select version_num from alembic_version").fetchone()
            except psycopg.errors.UndefinedTable:
                row = None
        return {"airflow": version("apache-airflow"), "revision": row[0] if row else None}

    def _log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def _command(self, *arguments: str) -> list[str]:
        # -P: neither the script's folder nor the current one is on sys.path, as for the command `airflow`.
        return [sys.executable, "-P", str(Path(__file__).with_name("airflow_launch.py")), *arguments]


class _PortTaken(StageFailed):
    """Somebody took the port between our look and the API server's bind."""


def _part(service: str) -> str:
    return f"airflow-{service}"


def _not_healthy(api: AirflowApi, since: datetime) -> list[str]:
    """The services that have not said since then that they work."""
    try:
        health = api.health()
    except Unavailable:
        return ["api-server"]
    waiting = [] if health["metadatabase"]["status"] == "healthy" else ["api-server"]
    for service, component in _HEARTBEATS.items():
        beat = health[component][f"latest_{component}_heartbeat"]
        healthy = health[component]["status"] == "healthy"
        if not healthy or beat is None or datetime.fromisoformat(beat) < since:
            waiting.append(service)
    return waiting
