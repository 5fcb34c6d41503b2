"""Rows from an iterator that may block, as units: a row, or all turns of one session."""

import asyncio
from collections import deque
from collections.abc import Iterator

from tasks.batch.records import Row


class Source:
    """Reads one chunk ahead, in a thread."""

    def __init__(self, chunks: Iterator[list[Row]]) -> None:
        self._chunks = _units(chunks)
        self._units: deque[list[Row]] = deque()
        self._reading: asyncio.Future[list[list[Row]] | None] | None = None
        self._exhausted = False

    @property
    def is_empty(self) -> bool:
        """Whether all rows were taken."""
        return self._exhausted and not self._units

    async def next(self) -> list[Row] | None:
        """The next unit; None when there are no more."""
        while not self._units and not self._exhausted:
            self._read_ahead()
            assert self._reading is not None
            # Shielded: a runner that is cancelled must not take the chunk with it.
            await asyncio.shield(self._reading)
            self._take_chunk()
        unit = self._units.popleft() if self._units else None
        self._take_chunk()
        self._read_ahead()
        return unit

    def _read_ahead(self) -> None:
        if self._reading is None and not self._exhausted:
            loop = asyncio.get_running_loop()
            self._reading = loop.run_in_executor(None, next, self._chunks, None)

    def _take_chunk(self) -> None:
        """Take the chunk that was read, once the rows before it are used up: one chunk ahead and no more."""
        if self._units or self._reading is None or not self._reading.done():
            return
        chunk = self._reading.result()
        self._reading = None
        if chunk is None:
            self._exhausted = True
        else:
            self._units.extend(chunk)


def _units(chunks: Iterator[list[Row]]) -> Iterator[list[list[Row]]]:
    """Rows of one session come one after the other, perhaps over the end of a chunk."""
    open_session: list[Row] = []
    for chunk in chunks:
        units: list[list[Row]] = []
        for row in chunk:
            if open_session and row.session != open_session[0].session:
                units.append(open_session)
                open_session = []
            if row.session is None:
                units.append([row])
            else:
                open_session.append(row)
        yield units
    if open_session:
        yield [open_session]
