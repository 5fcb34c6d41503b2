"""Whole records of finished rows, fetched by where they lie: in segments, or in the version published before."""

import mmap
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.batch import published, segments
from tasks.batch.rows import Answers
from tasks.errors import StageFailed


class Store:
    """The records of `answers`, for the length of a block."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self._stack = ExitStack()
        self._segments: dict[int, mmap.mmap] = {}
        self._part: tuple[int, pa.Table] | None = None

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def records(self, numbers: pa.ChunkedArray) -> pa.Table:
        """The records of these rows of `answers.known`, in this order, as they are published.

        Raises:
            StageFailed: a record went away while we read.
        """
        wanted = self.answers.known.select(["path", "offset", "length"]).take(numbers)
        is_published = pc.less(wanted.column("length"), 0)
        tables, order = [], []
        place = pa.chunked_array([pa.arange(0, wanted.num_rows)])
        for found, is_there in (
            (self._from_segments(wanted.filter(pc.invert(is_published))), pc.invert(is_published)),
            *self._from_published(wanted, is_published),
        ):
            tables.append(found)
            order += place.filter(is_there).chunks
        table = pa.concat_tables(tables)
        return table if len(tables) == 1 else table.take(pc.sort_indices(pa.concat_arrays(order)))

    def _from_segments(self, wanted: pa.Table) -> pa.Table:
        documents = []
        for path, offset, length in zip(*(column.to_pylist() for column in wanted.columns), strict=True):
            try:
                documents.append(segments.document_at(self._segment(path), offset, length))
            except (OSError, ValueError):
                raise self._gone(path) from None
        return segments.table_of(documents, published.SCHEMA).cast(published.SCHEMA)

    def _from_published(
        self, wanted: pa.Table, is_published: pa.ChunkedArray
    ) -> list[tuple[pa.Table, pa.ChunkedArray]]:
        """Parts follow the input's order, as the reading does: one in memory is enough."""
        found = []
        for path in pc.unique(wanted.column("path").filter(is_published)).to_pylist():
            of_this = pc.and_(is_published, pc.equal(wanted.column("path"), path))
            if self._part is None or self._part[0] != path:
                try:
                    self._part = (path, pq.read_table(self.answers.paths[path]))
                except (OSError, pa.ArrowInvalid):
                    raise self._gone(path) from None
            rows = self._part[1].take(wanted.column("offset").filter(of_this))
            found.append((rows.select(published.SCHEMA.names).cast(published.SCHEMA), of_this))
        return found

    def _segment(self, path: int) -> mmap.mmap:
        if path not in self._segments:
            file = os.open(self.answers.paths[path], os.O_RDONLY)
            try:
                self._segments[path] = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(file)
            self._stack.callback(partial(self._close, path))
        return self._segments[path]

    def _close(self, path: int) -> None:
        self._segments.pop(path).close()

    def _gone(self, path: int) -> StageFailed:
        where: Path = self.answers.paths[path]
        return StageFailed(f"finished rows in {where} went away while they were read; publish again")
