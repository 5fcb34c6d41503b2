"""The rows of the input, in parts that several processes read beside each other.

The order is fixed: files by name, rows as they stand. So two cuts of the same files are alike, and a part can be
read again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.batch.input import InputDescription, InputFile, json_documents, wanted
from tasks.errors import InputError
from tasks.spec import Batch

PART_ROWS = 50_000
"""Rows that are read, prepared and later published together: what one process takes at a time."""

_READ_ROWS = 1024


@dataclass(frozen=True)
class Piece:
    """Rows of one file that follow each other."""

    file: InputFile
    first: int
    """Number of the first of them, from 0; with JSON Lines of its line."""
    rows: int
    """With JSON Lines: lines, empty ones too."""
    offset: int = 0
    """With JSON Lines: bytes of the file before the first of them."""


@dataclass(frozen=True)
class Part:
    """What one process takes at a time."""

    number: int
    position: int
    """Of its first row in the input."""
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        """With JSON Lines: lines, empty ones too."""
        return sum(piece.rows for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row as it stands in the input."""

    id: str | int | None
    text: Any
    """Of the column `prompt` or `messages`; None when the row has none. With `openai_batch`: the request."""
    place: str
    """File and row, for messages to people."""
    session: str | int | None = None
    sampling: Any = None
    """Of the column `row_sampling`."""
    schema: Any = None
    """Of the column `row_schema`."""


def cut(description: InputDescription, part_rows: int) -> list[Part]:
    """The input as parts of at most `part_rows` rows; small files share one."""
    parts: list[Part] = []
    position = 0
    for pieces in _together(description, part_rows):
        parts.append(Part(len(parts), position, tuple(pieces)))
        position += parts[-1].rows
    return parts


def read(batch: Batch, part: Part) -> Iterator[InputRow]:
    """The rows of a part, one after the other; memory stays flat.

    Raises:
        InputError: a file changed its columns or holds a line that is not a JSON object.
    """
    for piece in part.pieces:
        yield from (_parquet_rows if piece.file.format == "parquet" else _json_rows)(piece, batch)


def _together(description: InputDescription, part_rows: int) -> Iterator[list[Piece]]:
    pieces: list[Piece] = []
    rows = 0
    for piece in (one for file in description.files for one in _pieces(file, part_rows)):
        if pieces and rows + piece.rows > part_rows:
            yield pieces
            pieces, rows = [], 0
        pieces.append(piece)
        rows += piece.rows
    if pieces:
        yield pieces


def _pieces(file: InputFile, part_rows: int) -> Iterator[Piece]:
    if file.format == "parquet":
        total = pq.read_metadata(file.path).num_rows
        for first in range(0, total, part_rows):
            yield Piece(file, first, min(part_rows, total - first))
        return
    first, rows, offset, size = 0, 0, 0, 0
    with file.path.open("rb") as lines:
        for line in lines:
            if rows == part_rows:
                yield Piece(file, first, rows, offset)
                first, rows, offset, size = first + rows, 0, offset + size, 0
            rows += 1
            size += len(line)
    if rows:
        yield Piece(file, first, rows, offset)


def _parquet_rows(piece: Piece, batch: Batch) -> Iterator[InputRow]:
    columns_of = wanted(batch)
    text = batch.prompt or batch.messages or ""
    number = piece.first
    for table in _parquet_tables(piece, list(dict.fromkeys(columns_of.values()))):
        columns = {name: table.column(name).to_pylist() for name in table.schema.names}
        nothing = [None] * table.num_rows
        others = (
            columns[columns_of[field]] if field in columns_of else nothing
            for field in ("session", "row_sampling", "row_schema")
        )
        for one_id, one_text, *rest in zip(columns[batch.id], columns[text], *others, strict=True):
            number += 1
            yield InputRow(one_id, one_text, f"{piece.file.path.name}, row {number}", *rest)


def _parquet_tables(piece: Piece, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The piece's rows, out of the row groups that hold some of them."""
    start, stop = piece.first, piece.first + piece.rows
    with pq.ParquetFile(piece.file.path) as file:
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        ends = list(accumulate(sizes))
        groups = [number for number, end in enumerate(ends) if end > start and end - sizes[number] < stop]
        at = ends[groups[0]] - sizes[groups[0]]
        for table in file.iter_batches(batch_size=_READ_ROWS, row_groups=groups, columns=columns):
            skipped = max(0, start - at)
            found = table.slice(skipped, max(0, stop - at - skipped))
            at += table.num_rows
            if found.num_rows:
                yield found
            if at >= stop:
                return


def _json_rows(piece: Piece, batch: Batch) -> Iterator[InputRow]:
    is_openai = batch.format == "openai_batch"
    id_column = "custom_id" if is_openai else batch.id
    text = batch.prompt or batch.messages or ""
    for number, document in json_documents(piece.file.path, piece.offset, piece.first, piece.rows):
        place = f"{piece.file.path.name}, line {number}"
        one_id = document.get(id_column)
        if one_id is not None and (isinstance(one_id, bool) or not isinstance(one_id, str | int)):
            raise InputError(f"batch.id: {one_id!r} in {place} is neither a text nor an integer")
        yield InputRow(
            one_id,
            document if is_openai else document.get(text),
            place,
            document.get(batch.session) if batch.session else None,
            document.get(batch.row_sampling) if batch.row_sampling else None,
            document.get(batch.row_schema) if batch.row_schema else None,
        )
