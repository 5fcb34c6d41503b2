"""Everything that a stage of one run acts on, in one place that can be put back as it was.

A folder (the deployment's home, inputs, outputs) and a database (the ledger). `save` keeps a copy of both;
`restore` ends every process of the deployment and puts the copy back under the same paths and names, because
the ledger's facts hold absolute paths. The ledger comes back row by row (copying a whole database makes the
server write a checkpoint, most of a second), so its schema must not change in between.
"""

import hashlib
import random
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

from tasks import ledger as ledger_package
from tasks.ledger import Ledger, Run
from tasks.ledger.claims import take
from tasks.node import processes
from tasks.settings import REPOSITORY, Settings
from tasks.spec import RunSpec
from tests.kill.launcher import Action, Ended, Launcher
from tests.runs import port_range


class World:
    """One deployment with one run in it, for one test."""

    def __init__(
        self,
        root: Path,
        database_url: str,
        admin_url: str,
        launcher: Launcher,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            root: a new or empty folder; everything of this world that is a file lies below.
            database_url: a migrated database that belongs to this world alone.
            admin_url: a superuser's of the same server, who may put rows back without a claim.
            launcher: runs the actions.
            environment: further settings of the processes under test.
        """
        self.root = root
        self.home = root / "home"
        self.database_url = database_url
        self._admin_url = make_conninfo(admin_url, dbname=conninfo_to_dict(database_url)["dbname"])
        self._launcher = launcher
        self._scratch = root.with_name(root.name + ".kill")
        self._saved: _Rows | None = None
        for folder in (self.home, self._scratch):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("ledger-url", database_url), ("secret", secrets.token_hex(32))):
            (self.home / name).touch(mode=0o600)
            (self.home / name).write_text(content)
        first_port = port_range()[0] + 40 * random.randrange(25)
        self.environment = {
            "QWEN_PIPELINE_HOME": str(self.home),
            "QWEN_PIPELINE_LEDGER_URL_FILE": str(self.home / "ledger-url"),
            "QWEN_PIPELINE_PORT_RANGE": f"[{first_port}, {first_port + 39}]",
            **(environment or {}),
        }
        self.settings = Settings(home=self.home, ledger_url_file=self.home / "ledger-url")

    def ledger(self) -> Ledger:
        """A way to the ledger; the caller closes it."""
        return Ledger(self.database_url, REPOSITORY / "sql")

    def rows(self, query: str, *args: Any) -> list[dict[str, Any]]:
        """What `query` finds in the ledger."""
        with psycopg.connect(
            self.database_url, row_factory=dict_row, options="-c search_path=ledger,public"
        ) as connection:
            return connection.execute(query, args).fetchall()

    def register(self, run_id: str, spec: RunSpec, pins: Mapping[str, Any] | None = None) -> Run:
        """Start a run without asking the hub."""
        with self.ledger() as ledger:
            asked = spec.model_dump(mode="json")
            return ledger_package.register(ledger, run_id, spec, {"asked": asked, **(pins or {})})

    def finish(self, run_id: str, stage: str, facts: Mapping[str, Any]) -> None:
        """Record that an earlier stage of the run is done, with these facts."""
        with self.ledger() as ledger:
            claim, _ = take(ledger, run_id, stage, frozenset([stage]))
            claim.finish("done", "made by a test", dict(facts))

    def run(
        self,
        action: Action,
        *,
        kill_at: int | None = None,
        in_child: str | None = None,
        also: Sequence[str] = (),
        timeout_s: float = 120.0,
    ) -> Ended:
        """Run `action` on this world, in a process of its own."""
        return self._launcher.run(
            action,
            self.environment,
            self._scratch,
            kill_at=kill_at,
            in_child=in_child,
            also=also,
            timeout_s=timeout_s,
        )

    def log(self) -> str:
        """What the last action printed."""
        return (self._scratch / "log.txt").read_text()

    def processes(self) -> list[processes.Process]:
        """The living processes that carry this deployment's mark."""
        return processes.find(deployment=self.settings.deployment)

    def end_processes(self) -> None:
        """End them all, hard."""
        left = processes.end_all(self.processes, grace_s=0)
        assert not left, f"processes {left} cannot be ended"

    def save(self) -> None:
        """Keep the world as it is now, for `restore`."""
        self.end_processes()
        copy = self._scratch / "saved"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.root, copy, symlinks=True)
        with self._alone_in_the_ledger() as connection:
            self._saved = _Rows.read(connection)

    def restore(self) -> None:
        """The world as it was when it was saved."""
        assert self._saved is not None, "save the world first"
        self.end_processes()
        shutil.rmtree(self.root)
        shutil.copytree(self._scratch / "saved", self.root, symlinks=True)
        with self._alone_in_the_ledger() as connection:
            self._saved.write(connection)

    def close(self) -> None:
        """End its processes and remove the copy."""
        self.end_processes()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def files(self, *parts: str) -> dict[str, str]:
        """All below a folder of this world: path relative to it, to the SHA-256 of a file, or what it is."""
        top = self.root.joinpath(*parts)
        return {str(path.relative_to(top)): _content(path) for path in sorted(top.rglob("*"))}

    def _alone_in_the_ledger(self) -> psycopg.Connection[Any]:
        """A superuser's connection; the sessions of killed clients, which the server still serves, end."""
        connection = psycopg.connect(self._admin_url)
        connection.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
        return connection


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"a link to {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "a folder"


@dataclass(frozen=True)
class _Rows:
    """What is in every table of a database, and how far its sequences are."""

    tables: dict[tuple[str, str], bytes]
    """Schema and name, to what COPY writes."""
    sequences: dict[str, int | None]

    @classmethod
    def read(cls, connection: psycopg.Connection[Any]) -> "_Rows":
        tables = {}
        for table in cls._names(connection):
            command = sql.SQL("copy {} to stdout (format binary)").format(sql.Identifier(*table))
            with connection.cursor().copy(command) as copy:
                tables[table] = b"".join(bytes(block) for block in copy)
        found = connection.execute(
            "select format('%I.%I', schemaname, sequencename), last_value from pg_sequences"
        )
        return cls(tables, dict(found.fetchall()))

    def write(self, connection: psycopg.Connection[Any]) -> None:
        assert self._names(connection) == list(self.tables), "the schema is not the one that was saved"
        # Neither triggers nor foreign keys look at a replica's writes.
        connection.execute("set local session_replication_role = replica")
        connection.execute("set local synchronous_commit = off")
        for table, content in self.tables.items():
            connection.execute(sql.SQL("delete from {}").format(sql.Identifier(*table)))
            command = sql.SQL("copy {} from stdin (format binary)").format(sql.Identifier(*table))
            with connection.cursor().copy(command) as copy:
                copy.write(content)
        for name, last in self.sequences.items():
            connection.execute("select setval(%s, %s, %s)", [name, last or 1, last is not None])

    @staticmethod
    def _names(connection: psycopg.Connection[Any]) -> list[tuple[str, str]]:
        found = connection.execute(
            "select schemaname, tablename from pg_tables "
            "where schemaname not in ('pg_catalog', 'information_schema') order by 1, 2"
        )
        return [(schema, name) for schema, name in found.fetchall()]
