"""How what is done with a server ends early: the work says why the server is of no use, or the server exits."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from tasks.serving.diagnosis import Diagnosis


class Failed(Exception):
    """The server ended, or is as good as ended."""

    def __init__(self, why: Diagnosis) -> None:
        super().__init__(why.message)
        self.why = why


async def unless_it_exits(exited: asyncio.Event, work: Coroutine[Any, Any, None]) -> Failed | None:
    """Do `work` unless the server exits before; returns how it failed. None: done, or exited."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(exited.wait())
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done() or not doing.done():
            return None
        try:
            doing.result()
        except Failed as failed:
            return failed
        return None
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)
