"""Bring the ledger's schema up to date.

yoyo applies the numbered SQL files under sql/migrations: plain SQL that people read, one transaction each, with
a hash of what was applied, and psycopg 3. Its own lock is a row that a killed process leaves behind, so
PostgreSQL's advisory lock, which dies with its holder, decides who migrates; whoever has it may break yoyo's.
"""

from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict
from yoyo import get_backend, read_migrations
from yoyo.connections import DatabaseURI

from tasks.errors import Unavailable

_ADVISORY_LOCK = 0x7177656E  # "qwen"


def migrate(url: str, folder: Path) -> list[str]:
    """Apply what is missing; returns the names of the migrations applied, in order.

    Raises:
        Unavailable: the database cannot be reached.
    """
    try:
        guard = psycopg.connect(url, autocommit=True, connect_timeout=10)
    except psycopg.OperationalError as error:
        raise Unavailable(f"the ledger cannot be reached to migrate it: {error}") from None
    with guard:
        guard.execute("select pg_advisory_lock(%s)", [_ADVISORY_LOCK])
        backend = get_backend(_uri(url))
        try:
            backend.break_lock()
            missing = backend.to_apply(read_migrations(str(folder)))
            with backend.lock():
                backend.apply_migrations(missing)
            return [migration.id for migration in missing]
        finally:
            backend.connection.close()


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
        args={"unix_socket": host} if host.startswith("/") else {},
    )
