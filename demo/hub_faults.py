"""What a hub and the network before it can do wrong, on demand. For tests only."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """The next `times` requests whose path contains `path` are answered with `status`."""

    status: int
    times: int
    path: str = ""
    retry_after_s: int = 0


class Faults:
    """Faults to serve with. A count goes down with each use; what has reached zero is served well."""

    def __init__(
        self,
        *,
        refusals: tuple[Refusal, ...] = (),
        wrong_bytes: frozenset[str] = frozenset(),
        truncated: Mapping[str, int] | None = None,
        wrong_hash: frozenset[str] = frozenset(),
    ) -> None:
        """
        Args:
            refusals: see Refusal.
            wrong_bytes: files (by their path in the repository) whose last byte is changed on the way, so
                that only a hash tells.
            truncated: how often the body of each of these files ends in its middle, connection closed.
            wrong_hash: large files whose sha256 is announced wrong.
        """
        self._refusals = refusals
        self._refusals_left = [refusal.times for refusal in refusals]
        self._wrong_bytes = wrong_bytes
        self._truncated = dict(truncated or {})
        self._wrong_hash = wrong_hash
        self._lock = threading.Lock()

    def refusal(self, request_path: str) -> Refusal | None:
        """The refusal that this request meets, if any."""
        with self._lock:
            for number, refusal in enumerate(self._refusals):
                if self._refusals_left[number] and refusal.path in request_path:
                    self._refusals_left[number] -= 1
                    return refusal
        return None

    def truncates(self, file_path: str) -> bool:
        """Whether this body ends in its middle."""
        with self._lock:
            left = self._truncated.get(file_path, 0)
            self._truncated[file_path] = max(0, left - 1)
            return left > 0

    def falsifies(self, file_path: str) -> bool:
        """Whether the last byte of this file is sent wrong."""
        return file_path in self._wrong_bytes

    def lies_about(self, file_path: str) -> bool:
        """Whether this file's hash is announced wrong."""
        return file_path in self._wrong_hash
