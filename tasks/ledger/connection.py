"""A connection to the ledger, and its named queries.

Keeps: whatever is written is written in a transaction; a database that went away for a moment is waited for,
because a stage that took an hour must not fail on a restart of PostgreSQL.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import aiosql
import psycopg
from psycopg.rows import dict_row

from tasks.errors import Unavailable

Connection = psycopg.Connection[dict[str, Any]]

_OPTIONS = "-c search_path=ledger,public -c statement_timeout=60s -c lock_timeout=30s -c timezone=UTC"
_NOTICE_A_DEAD_NETWORK: dict[str, Any] = {
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""Without these a stage hangs for a quarter of an hour on a host that was cut off (libpq, 34.1.2)."""

_FIRST_WAIT_S = 0.2


class Ledger:
    """One process's way to the ledger. Connects when first used and again when the connection was lost.

    Transactions of several threads wait for each other; a thread that must not wait for another's takes its
    own way (`Ledger.again`).
    """

    def __init__(self, url: str, sql: Path, patience_s: float = 60.0) -> None:
        """
        Args:
            url: libpq URL, with the password.
            sql: the folder that holds `queries/`.
            patience_s: how long to keep trying to connect before `Unavailable` is raised.
        """
        self._url = url
        self._sql = sql
        self._patience_s = patience_s
        self._connection: Connection | None = None
        # A second thread's transaction would begin inside the first's and be committed or lost with it.
        self._one_thread = threading.RLock()
        self.queries = _queries(sql / "queries")

    def again(self) -> "Ledger":
        """A second way to the same ledger, for another thread."""
        return Ledger(self._url, self._sql, self._patience_s)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction, committed at the end of the block and rolled back when it raises.

        Raises:
            Unavailable: the database cannot be reached, went away before the commit was confirmed, or could not
                do it for now (a lock, its disk, a time limit). Every write here may be repeated, so the answer to
                that is to try again.
        """
        with self._one_thread:
            connection = self._connected()
            try:
                with connection.transaction():
                    yield connection
            except psycopg.OperationalError as error:
                if not connection.closed:
                    raise Unavailable(
                        f"the ledger could not do it for now ({_first_line(error)}); nothing half done was kept, "
                        f"try again"
                    ) from None
                self._connection = None
                raise Unavailable(
                    f"the connection to the ledger was lost ({_first_line(error)}); "
                    f"nothing half done was kept, try again"
                ) from None

    def close(self) -> None:
        """Close the connection; the next use opens one again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _connected(self) -> Connection:
        if self._connection is not None and self._answers(self._connection):
            return self._connection
        deadline = time.monotonic() + self._patience_s
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                self._connection = psycopg.connect(
                    self._url,
                    autocommit=True,
                    row_factory=dict_row,
                    options=_OPTIONS,
                    connect_timeout=10,
                    application_name="qwen-pipeline",
                    **_NOTICE_A_DEAD_NETWORK,
                )
                return self._connection
            except psycopg.OperationalError as error:
                if time.monotonic() + wait_s > deadline:
                    raise Unavailable(
                        f"the ledger cannot be reached: {_first_line(error)}; tried for {self._patience_s:.0f} s. "
                        f"Check that PostgreSQL runs and that the URL is right"
                    ) from None
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, 5.0)

    @staticmethod
    def _answers(connection: Connection) -> bool:
        """Asked before a transaction, when nothing is lost by connecting anew; within one it is too late."""
        if not connection.closed:
            with suppress(psycopg.OperationalError):
                connection.execute("select")
        return not connection.closed


@cache
def _queries(folder: Path) -> Any:
    return aiosql.from_path(folder, "psycopg", mandatory_parameters=False)


def _first_line(error: BaseException) -> str:
    # libpq's messages name host, port and user, never the password.
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
