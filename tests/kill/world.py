"""Everything that a stage of one run acts on, in one place that can be put back as it was.

A folder (the deployment's home, inputs, outputs) and a database (the ledger). `save` keeps a copy of both;
`restore` ends every process of the deployment and puts the copy back under the same paths and names, because
the ledger's facts hold absolute paths.
"""

import hashlib
import os
import random
import secrets
import shutil
from collections.abc import Mapping, Sequence
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
            database_url: an empty or migrated database that belongs to this world alone.
            admin_url: a superuser's, to copy and drop that database.
            launcher: runs the actions.
            environment: further settings of the processes under test.
        """
        self.root = root
        self.home = root / "home"
        self.database_url = database_url
        self._admin_url = admin_url
        self._launcher = launcher
        self._scratch = root.with_name(root.name + ".kill")
        self._saved_database: str | None = None
        for folder in (self.home, self._scratch):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("ledger-url", database_url), ("secret", secrets.token_hex(32))):
            (self.home / name).touch(mode=0o600)
            (self.home / name).write_text(content)
        first_port = 20000 + 40 * random.randrange(25)
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
        self._saved_database = self._saved_database or f"{self._database}_saved"
        self._copy_database(self._database, self._saved_database)

    def restore(self) -> None:
        """The world as it was when it was saved."""
        assert self._saved_database is not None, "save the world first"
        self.end_processes()
        shutil.rmtree(self.root)
        shutil.copytree(self._scratch / "saved", self.root, symlinks=True)
        self._copy_database(self._saved_database, self._database)

    def close(self) -> None:
        """End its processes and drop the copies."""
        self.end_processes()
        if self._saved_database is not None:
            with psycopg.connect(self._admin_url, autocommit=True) as connection:
                connection.execute(_drop(self._saved_database))
        shutil.rmtree(self._scratch, ignore_errors=True)

    def files(self, *parts: str) -> dict[str, str]:
        """Every file below a folder of this world, as a path relative to it, with its SHA-256."""
        top = self.root.joinpath(*parts)
        return {
            str(path.relative_to(top)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(top.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }

    @property
    def _database(self) -> str:
        return str(conninfo_to_dict(self.database_url)["dbname"])

    def _copy_database(self, source: str, target: str) -> None:
        with psycopg.connect(self._admin_url, autocommit=True) as connection:
            connection.execute(_drop(target))
            # A killed client's session ends when the server notices; until then nothing can be copied from it.
            connection.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", [source]
            )
            owner = connection.execute(
                "select pg_get_userbyid(datdba) from pg_database where datname = %s", [source]
            ).fetchone()
            assert owner is not None, f"there is no database {source}"
            connection.execute(
                sql.SQL("create database {} template {} owner {}").format(
                    sql.Identifier(target), sql.Identifier(source), sql.Identifier(owner[0])
                )
            )


def with_database(url: str, name: str) -> str:
    """`url` with another database."""
    return make_conninfo(url, dbname=name)


def _drop(name: str) -> sql.Composed:
    return sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))


def path_of(root: Path, *parts: str) -> Path:
    """A folder below `root`, made."""
    folder = root.joinpath(*parts)
    os.makedirs(folder, exist_ok=True)
    return folder
