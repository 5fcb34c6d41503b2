"""Registering segments while they grow, and showing how far the run is."""

import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from tasks.batch import in_ledger, segments
from tasks.batch.in_ledger import Range
from tasks.batch.prepared import PreparedBatch
from tasks.errors import Unavailable
from tasks.ledger import Claim, quotas
from tasks.settings import Quota

_PACE_WINDOW_S = 30.0
"""Over which rows and tokens per second are shown."""

_COUNTED = pa.schema(
    [
        pa.field("status", pa.string()),
        pa.field("prompt_tokens", pa.int64()),
        pa.field("completion_tokens", pa.int64()),
        pa.field("worker", pa.string()),
    ]
)


class Registrar:
    """For the length of a block, registers every few seconds what the segments of one claim have grown by."""

    def __init__(
        self,
        claim: Claim,
        batch: PreparedBatch,
        attempt: str,
        *,
        finished: int,
        failed: int,
        every_s: float,
        tokens_left: int | None,
        stop_file: Path,
        tenant: str = "",
        quota: Quota | None = None,
    ) -> None:
        """
        Args:
            attempt: how the names of this claim's segments begin.
            finished: rows answered or failed before; `failed` of them failed.
            tokens_left: what the run may still spend; `stop_file` is made once it is spent. None: no limit.
            quota: of `tenant`, whose other runs spend of it too; the same when that is spent.
        """
        self._claim = claim.in_thread()
        self._batch = batch
        self._attempt = attempt
        self._finished = finished
        self._failed = failed
        self._every_s = every_s
        self._tokens_left = tokens_left
        self._stop_file = stop_file
        self._tenant = tenant
        self._quota = quota
        self.spark_ui: str | None = None
        """Where Spark's page of this application is, once it is known."""
        self._registering = threading.Lock()
        self._read: dict[Path, Range] = {}
        self._unregistered: dict[Path, Range] = {}
        """Read, but the ledger has not confirmed it."""
        self._tokens = 0
        self._by_worker: Counter[str] = Counter()
        self._pace = [(time.monotonic(), finished, 0)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="registrar", daemon=True)

    def __enter__(self) -> "Registrar":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        # Also when the application failed: what is finished stays finished.
        self.register()
        self._claim.ledger.close()

    def register(self) -> None:
        """Register what is on disk by now, and show it.

        Raises:
            Fenced: the claim has ended.
        """
        # Asked by the driver between its passes while this object's own thread may be at it.
        with self._registering:
            for path in self._paths():
                self._read_on(path)
            if self._unregistered:
                in_ledger.register(self._claim, self._batch.batch_id, self._unregistered.values())
                self._unregistered.clear()
            self._show()
            is_spent = self._tokens_left is not None and self._tokens >= self._tokens_left
            if is_spent or quotas.tokens_are_spent(self._claim.ledger, self._tenant, self._quota):
                self._stop_file.touch()

    def _work(self) -> None:
        while True:
            # When the ledger is away or ails, what is on disk is registered when it is back; at the latest at the end.
            with suppress(Unavailable, psycopg.Error):
                self.register()
            if self._over.wait(self._every_s):
                return

    def _paths(self) -> list[Path]:
        return sorted(self._batch.segments.glob(f"{self._attempt}*{segments.SUFFIX}"))

    def _read_on(self, path: Path) -> None:
        """Read the whole records that the segment has grown by."""
        before = self._read.get(path, Range(path, 0, 0, 0))
        if path.stat().st_size <= before.stop:
            return
        rows, stop, tokens_before = before.rows, before.stop, self._tokens
        for table in segments.tables(path, before.stop, path.stat().st_size, _COUNTED):
            rows += table.num_rows
            stop = table.column("offset")[-1].as_py() + table.column("length")[-1].as_py()
            self._count(table)
        if stop > before.stop:
            tokens = before.tokens + self._tokens - tokens_before
            self._read[path] = self._unregistered[path] = Range(path, 0, stop, rows, tokens=tokens)

    def _count(self, table: pa.Table) -> None:
        self._finished += table.num_rows
        self._failed += pc.sum(pc.equal(table.column("status"), "failed")).as_py()
        for name in ("prompt_tokens", "completion_tokens"):
            self._tokens += pc.sum(table.column(name)).as_py()
        for one in pc.value_counts(table.column("worker").combine_chunks().drop_null()).to_pylist():
            self._by_worker[one["values"]] += one["counts"]

    def _show(self) -> None:
        now = time.monotonic()
        self._pace.append((now, self._finished, self._tokens))
        while len(self._pace) > 2 and now - self._pace[0][0] > _PACE_WINDOW_S:
            del self._pace[0]
        began, finished, tokens = self._pace[0]
        elapsed_s = max(now - began, 0.001)
        rows_per_s = (self._finished - finished) / elapsed_s
        left = max(0, self._batch.rows - self._finished)
        self._claim.progress(
            min(self._finished, self._batch.rows),
            self._batch.rows,
            "rows",
            failed=self._failed,
            rows_per_s=round(rows_per_s, 2),
            tokens_per_s=round((self._tokens - tokens) / elapsed_s, 1),
            by_worker=dict(self._by_worker),
            eta_s=round(left / rows_per_s, 1) if rows_per_s > 0 else None,
            spark_ui=self.spark_ui,
        )
