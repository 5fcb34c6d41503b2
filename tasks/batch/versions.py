"""One version of the answers, as files: what `publish` then moves into its place.

Of several records of a row the first committed one is in it; the order is the input's.
"""

import json
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.batch import files, published, rows
from tasks.batch.formats import open_format
from tasks.batch.prepared import PreparedBatch
from tasks.batch.rows import Answers
from tasks.batch.store import Store
from tasks.spec import RunSpec


def write(batch: PreparedBatch, answers: Answers, spec: RunSpec, folder: Path) -> dict[str, Any]:
    """Write all files of the version into `folder`; returns its manifest."""
    counts = {"answered": 0, "failed": 0, "not_started": 0}
    described = []
    # Looked up once for all parts: the table of finished ids is hashed anew each time.
    places = answers.places_of(rows.prepared_rows(batch, ["id"]).column("id"))
    begin = 0
    with ExitStack() as stack:
        store = stack.enter_context(Store(answers))
        others = [
            stack.enter_context(open_format(folder, name, spec)) for name in ("failed", *spec.batch.also)
        ]
        for number, part in enumerate(batch.parts):
            prepared_rows = pq.read_table(part)
            of_part = places.slice(begin, prepared_rows.num_rows)
            begin += prepared_rows.num_rows
            table = _published(prepared_rows, of_part, store, spec, batch.manifest["identity"]["release_id"])
            failed = pc.sum(pc.equal(table.column("status"), "failed")).as_py() or 0
            counts["failed"] += failed
            counts["answered"] += table.num_rows - failed
            counts["not_started"] += prepared_rows.num_rows - table.num_rows
            path = folder / f"part-{number:05d}.parquet"
            pq.write_table(table, path, compression="zstd")
            described.append({**files.describe(path), "rows": table.num_rows})
            for other in others:
                other.add(table, prepared_rows)
    described += [{**files.describe(folder / other.name), "rows": other.rows} for other in others]
    version = sha256(json.dumps([item["sha256"] for item in described]).encode()).hexdigest()[:12]
    return {
        "format": 1,
        "batch_id": batch.batch_id,
        "release_id": batch.manifest["identity"]["release_id"],
        "version": f"v-{version}",
        "rows": batch.rows,
        **counts,
        "partial": counts["not_started"] > 0,
        "files": described,
    }


def _published(
    prepared_rows: pa.Table, places: pa.ChunkedArray, store: Store, spec: RunSpec, release_id: str
) -> pa.Table:
    """The finished ones of some prepared rows, in their order, as they are published.

    Args:
        places: of these rows among the finished ones, see `Answers.places_of`.
    """
    is_finished = pc.is_valid(places)
    others = prepared_rows.filter(pc.invert(is_finished))
    is_refused = rows.never_sent(others, spec)
    refused = _refused(others.filter(is_refused), spec, release_id)
    table = pa.concat_tables([store.records(places.drop_null()), refused])
    if not refused.num_rows:
        return table
    numbers = pa.chunked_array([pa.arange(0, prepared_rows.num_rows)])
    order = pa.concat_arrays(
        [
            *numbers.filter(is_finished).chunks,
            *numbers.filter(pc.invert(is_finished)).filter(is_refused).chunks,
        ]
    )
    return table.take(pc.sort_indices(order))


def _refused(prepared_rows: pa.Table, spec: RunSpec, release_id: str) -> pa.Table:
    """Rows that are never sent, as they are published."""
    columns = ["error_class", "error_message", "prompt_tokens", "max_tokens"]
    reasons = [rows.why_never_sent(row, spec) for row in prepared_rows.select(columns).to_pylist()]
    count = prepared_rows.num_rows
    known = {
        "id": prepared_rows.column("id"),
        "status": pa.repeat("failed", count),
        "error_class": pa.array([name for name, _ in reasons], pa.string()),
        "error_message": pa.array([message for _, message in reasons], pa.string()),
        "prompt_tokens": prepared_rows.column("prompt_tokens").cast(pa.int64()),
        "completion_tokens": pa.repeat(pa.scalar(0, pa.int64()), count),
        "attempts": pa.repeat(pa.scalar(0, pa.int32()), count),
        "release_id": pa.repeat(release_id, count),
    }
    return pa.table(
        [known.get(field.name, pa.nulls(count, field.type)) for field in published.SCHEMA],
        schema=published.SCHEMA,
    )
