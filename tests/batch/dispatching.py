"""Rows, jobs and answers for the tests of a dispatcher at stand-in workers."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.batch.answering import Job
from tasks.batch.records import Result, Row
from tasks.batch.segments import records
from tests.batch.stand_in import StandIn

KEY = "the-key-of-the-pool"


def rows_of(count: int) -> list[Row]:
    return [
        Row(f"row-{n}", f'[{{"role":"user","content":"question {n}"}}]', prompt_tokens=4)
        for n in range(count)
    ]


def chunks_of(rows: list[Row], size: int = 16) -> Iterator[list[Row]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def job(pool: StandIn, folder: Path, **changes: Any) -> Job:
    defaults: dict[str, Any] = {
        "registry": pool.registry,
        "key": KEY,
        "release_id": "release-1",
        "sampling": {"max_tokens": 8, "temperature": 0.0},
        "schema": None,
        "segments": folder,
        "attempt": "attempt-",
        "max_model_len": None,
        "proven": True,
        "stop_file": folder / "stop",
        "stop_at": time.time() + 3600,
        "shares": 1,
        "request_timeout_s": 20.0,
        "request_timeout_least_s": 0.2,
        "patience_s": 20.0,
        "registry_poll_s": 0.1,
        "flush_s": 0.2,
    }
    return Job(**{**defaults, **changes})


def finished(folder: Path) -> list[Result]:
    return [
        Result.from_json(found.document) for path in sorted(folder.glob("*.seg")) for found in records(path)
    ]


@contextmanager
def in_background(work: Any) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()
