"""The most of something that was seen while a block ran."""

import threading
from types import TracebackType

from benchmarks.gpu.kit import memory_used_bytes

_EVERY_S = 0.25


class Peak:
    """Of the memory of this step's GPU."""

    def __init__(self) -> None:
        self._before = memory_used_bytes() or 0
        self._most = self._before
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def found(self) -> dict[str, int]:
        """For a result."""
        return {"gpu_memory_before_bytes": self._before, "gpu_memory_most_bytes": self._most}

    def _work(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._most = max(self._most, memory_used_bytes() or 0)
