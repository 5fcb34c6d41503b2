"""What the servers of one slot hand on to each other: compiled kernels, and memory that must be back in between."""

import asyncio
import logging
from pathlib import Path

from tasks.serving import compile_cache, device_memory
from tasks.serving.diagnosis import Diagnosis
from tasks.serving.launch import Slot
from tasks.serving.line import now_s
from tasks.serving.server import Job

log = logging.getLogger(__name__)

_MEMORY_WAIT_S = 30.0
_POLL_S = 1.0


class SlotState:
    """Of one slot, for as long as its keeper lives."""

    def __init__(self, slot: Slot, job: Job) -> None:
        self._slot = slot
        self._settings = job.settings
        kind = device_memory.kind(slot, job.settings)
        self.cache: Path = compile_cache.folder(job.settings, job.release_path, kind)
        self.cache_was_warm = False
        """When the newest attempt began."""
        self._memory_before = device_memory.used_bytes(slot, job.settings)

    def begin(self) -> None:
        """An attempt begins."""
        self.cache_was_warm = compile_cache.use(self.cache)

    def memory_bytes(self) -> int:
        """In use on the slot's devices now."""
        return device_memory.used_bytes(self._slot, self._settings)

    async def dropped_its_cache(self, why: Diagnosis, was_ready: bool) -> bool:
        """After an attempt that failed: drop a cache that may be to blame; returns whether it was.

        That is one that another worker left, when a start failed for no reason that is known, or names it.
        """
        may_be = why.kind == "unknown" or str(self.cache) in why.message
        if was_ready or not self.cache_was_warm or not may_be:
            return False
        await asyncio.to_thread(compile_cache.drop, self.cache)
        return True

    async def until_memory_is_back(self) -> None:
        """A worker that starts beside the memory of its predecessor takes too little (vllm #55827)."""
        if not self._memory_before:
            return
        deadline = now_s() + _MEMORY_WAIT_S
        allowed = self._memory_before + self._settings.memory_tolerance_mb * 2**20
        while await asyncio.to_thread(self.memory_bytes) > allowed:
            if now_s() > deadline:
                log.warning("the memory of slot %s is not back; it is used all the same", self._slot.slot_id)
                return
            await asyncio.sleep(_POLL_S)
