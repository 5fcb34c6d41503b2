"""Bring the ledger's schema up to date.

yoyo reads and orders the numbered SQL files under sql/migrations (plain SQL that people read) and records
what was applied, over psycopg 3. Two things are done here and not left to it:
- yoyo commits a migration and the record of it separately, so a kill in between would leave a migration that
  can never be applied again. Here both are in one transaction.
- yoyo's lock is a row that a killed process leaves behind. Here PostgreSQL's advisory lock of the session
  that does the work decides who migrates: it ends with that session, not before; whoever has it may break
  yoyo's.
"""

from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict
from yoyo import default_migration_table, read_migrations
from yoyo.backends.core.postgresql import PostgresqlPsycopgBackend
from yoyo.connections import DatabaseURI

from tasks.errors import Unavailable

_RECORDS_SCHEMA = "public"
_ADVISORY_LOCK = 0x7177656E  # "qwen"


def migrate(url: str, folder: Path) -> list[str]:
    """Apply what is missing; returns the names of the migrations applied, in order.

    Raises:
        Unavailable: the database cannot be reached.
    """
    try:
        backend = PostgresqlPsycopgBackend(_uri(url), default_migration_table)
    except psycopg.OperationalError as error:
        raise Unavailable(f"the ledger cannot be reached to migrate it: {error}") from None
    try:
        backend.execute("select pg_advisory_lock(:key)", {"key": _ADVISORY_LOCK})
        backend.init_database()
        backend.break_lock()
        missing = backend.to_apply(read_migrations(str(folder)))
        for migration in missing:
            with backend.transaction():
                migration.process_steps(backend, "apply")
                backend.mark_one(migration)
        return [migration.id for migration in missing]
    finally:
        backend.connection.close()


def pending(url: str, folder: Path) -> list[str]:
    """The names of the migrations that are not applied yet, in order; reads only.

    Raises:
        Unavailable: the database cannot be reached.
    """
    try:
        connection = psycopg.connect(url, autocommit=True, connect_timeout=10)
    except psycopg.OperationalError as error:
        raise Unavailable(f"the ledger cannot be reached to look at its schema: {error}") from None
    with connection:
        # A database that was never migrated does not have yoyo's table yet.
        records = f"{_RECORDS_SCHEMA}.{default_migration_table}"
        exists = connection.execute("select to_regclass(%s) is not null", [records]).fetchone()
        rows = (
            connection.execute(f"select migration_id from {records}").fetchall() if exists == (True,) else []
        )
    applied = {name for (name,) in rows}
    return [migration.id for migration in read_migrations(str(folder)) if migration.id not in applied]


def _uri(url: str) -> DatabaseURI:
    """libpq's URL in yoyo's words."""
    parts = conninfo_to_dict(url)
    host = str(parts.get("host") or "")
    return DatabaseURI(
        scheme="postgresql+psycopg",
        username=str(parts.get("user") or ""),
        password=str(parts.get("password") or ""),
        hostname="" if host.startswith("/") else host,
        port=int(str(parts["port"])) if parts.get("port") else None,
        database=str(parts.get("dbname") or ""),
        # Its tables must not move when a schema with the role's name appears, as `ledger` may be.
        args={"schema": _RECORDS_SCHEMA, **({"host": host} if host.startswith("/") else {})},
    )
