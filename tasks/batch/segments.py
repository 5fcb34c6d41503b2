"""Segments: append-only files of finished rows.

A line is `crc32 SP json LF`: the checksum as 8 hex digits, then the result. Keeps:
- a file has one writer for ever: its name is unique to the attempt;
- what `flush` returned for is on disk;
- a reader takes whole records only and stops at the first bad one, so a torn write, a truncated file or a
  flipped bit costs the rows from there on (they are asked again) and never makes a wrong answer.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from mmap import mmap
from pathlib import Path
from types import TracebackType
from uuid import uuid4
from zlib import crc32

import pyarrow as pa
from pyarrow import json as arrow_json

from tasks.batch.records import Result
from tasks.errors import StageFailed

SUFFIX = ".seg"

_HEAD = len("00000000 ")
_BLOCK_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class Located:
    """A whole record and where it lies."""

    offset: int
    length: int
    """Of the line, in bytes, with its line break."""
    document: bytes

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + self.length


class SegmentWriter:
    """Writes one segment. `append` from one thread; `flush` from any."""

    def __init__(self, folder: Path, attempt: str) -> None:
        """
        Raises:
            StageFailed: the file cannot be made.
        """
        self.path = folder / f"{attempt}-{uuid4().hex}{SUFFIX}"
        with _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._pending: deque[bytes] = deque()
        self._lock = threading.Lock()

    def append(self, result: Result) -> None:
        """Take a result; it is durable after the next `flush`."""
        self._pending.append(line_of(result.to_json()))

    def flush(self) -> None:
        """Bring what was appended to disk.

        Raises:
            StageFailed: the disk is full or gone; the rows since the last flush are not kept.
        """
        with self._lock, _explained(self.path.parent):
            # A deque, taken from one by one, because `append` may run meanwhile.
            data = memoryview(b"".join(self._pending.popleft() for _ in range(len(self._pending))))
            if not data:
                return
            while data:
                data = data[os.write(self._file, data) :]
            os.fdatasync(self._file)

    def close(self) -> None:
        """Flush, and end the segment."""
        try:
            self.flush()
        finally:
            os.close(self._file)

    def __enter__(self) -> "SegmentWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def attempt_prefix(run_id: str, epoch: int) -> str:
    """How the names of all segments written under one claim begin; a run id may hold what a name may not."""
    return f"{sha256(run_id.encode()).hexdigest()[:10]}-e{epoch}-"


def line_of(document: bytes) -> bytes:
    """The line that holds `document`."""
    return b"%08x %b\n" % (crc32(document), document)


def records(path: Path, start: int = 0, stop: int | None = None) -> Iterator[Located]:
    """The whole records that lie between the bytes `start` and `stop`, up to the first bad one.

    A file that is gone has none.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        offset = start
        while stop is None or offset < stop:
            line = file.readline() if stop is None else file.readline(stop - offset)
            document = _document(line)
            if document is None:
                return
            yield Located(offset, len(line), document)
            offset += len(line)


def tables(path: Path, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.Table]:
    """The same records as columns: those of `schema`, and where each record lies (`offset`, `length`)."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        offset, rest, is_good = start, b"", True
        while is_good and (read := file.read(min(_BLOCK_BYTES, stop - file.tell()))):
            lines = (rest + read).split(b"\n")
            rest = lines.pop()
            documents: list[bytes] = []
            places: list[tuple[int, int]] = []
            for line in lines:
                document = line[_HEAD:]
                is_good = bool(document) and line[:_HEAD] == b"%08x " % crc32(document)
                if not is_good:
                    break
                documents.append(document)
                places.append((offset, len(line) + 1))
                offset += len(line) + 1
            if documents:
                offsets, lengths = zip(*places, strict=True)
                table = table_of(documents, schema)
                table = table.append_column("offset", pa.array(offsets, pa.int64()))
                yield table.append_column("length", pa.array(lengths, pa.int32()))


def table_of(documents: list[bytes], schema: pa.Schema) -> pa.Table:
    """Records as a table with the columns of `schema`."""
    if not documents:
        return schema.empty_table()
    data = b"\n".join(documents)
    return arrow_json.read_json(
        pa.BufferReader(data),
        # One block: a record must not straddle two.
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=pa.schema([field.with_nullable(True) for field in schema]),
            unexpected_field_behavior="ignore",
        ),
    )


def document_at(content: mmap | bytes, offset: int, length: int) -> bytes:
    """The record at a known place of a segment's content.

    Raises:
        ValueError: it is not there any more.
    """
    document = _document(content[offset : offset + length])
    if document is None:
        raise ValueError(f"no whole record at byte {offset}")
    return document


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StageFailed(
            f"finished rows cannot be written to {folder}: {error.strerror or error}. What was written "
            f"before is kept; make room there, then run the stage run again"
        ) from error


def _document(line: bytes) -> bytes | None:
    if len(line) <= _HEAD or line[-1:] != b"\n":
        return None
    document = line[_HEAD:-1]
    return document if line[:_HEAD] == b"%08x " % crc32(document) else None
