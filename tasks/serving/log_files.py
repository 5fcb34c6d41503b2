"""Logs of workers and keepers: bounded in size, and their newest lines for whoever asks.

A server writes to the file that it was given, so the file is copied and emptied while it stays open (appending
goes on at its new end). Lines that are written between the two are lost, and so is the whole text when the disk is
too full for the copy: nothing depends on them.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

_TAIL_BYTES = 200_000
_ROOM_BYTES = 1 << 20


def begin_anew(log: Path, keep: int) -> None:
    """Put the log aside, so that the next attempt's begins with its own first line."""
    if log.exists() and log.stat().st_size > 0:
        _shift(log, keep)
        log.rename(_numbered(log, 1))


def bound(log: Path, max_bytes: int, keep: int) -> None:
    """Put a log that has grown too large aside and empty it."""
    with suppress(FileNotFoundError):
        if log.stat().st_size <= max_bytes:
            return
        _shift(log, keep)
        aside = _numbered(log, 1)
        try:
            shutil.copyfile(log, aside)
        except OSError:
            aside.unlink(missing_ok=True)
        os.truncate(log, 0)


def tail(log: Path, lines: int) -> list[str]:
    """The newest lines, those of the file put aside last before them if need be.

    Empty when there is no such file.
    """
    found = _lines(log)
    if len(found) < lines:
        found = _lines(_numbered(log, 1)) + found
    return found[-lines:]


def has_room(log: Path) -> bool:
    """Whether the disk of the log can take another line."""
    try:
        return shutil.disk_usage(log.parent).free >= _ROOM_BYTES
    except OSError:
        return True


def _lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _TAIL_BYTES))
            # No more than that: it may grow meanwhile.
            return file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def _shift(log: Path, keep: int) -> None:
    for number in range(keep - 1, 0, -1):
        with suppress(FileNotFoundError):
            os.replace(_numbered(log, number), _numbered(log, number + 1))
    with suppress(FileNotFoundError):
        _numbered(log, keep + 1).unlink()


def _numbered(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
