"""Requests to workers all the time, as a batch sends them, and when each was answered how."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from tasks.serving import probes

_TOKENS = 16
_TIMEOUT_S = 60.0
_PAUSE_S = 0.2


@dataclass
class Traffic:
    """One client for each of `urls`, from entering the context to leaving it."""

    urls: Sequence[str]
    key: str
    model: str
    answered: list[float] = field(default_factory=list)
    """When (time.monotonic) a request was answered with 200."""
    failed: list[tuple[float, str]] = field(default_factory=list)
    """When one was not, and how."""

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._clients = [threading.Thread(target=self._ask, args=(url,), daemon=True) for url in self.urls]

    def __enter__(self) -> "Traffic":
        for client in self._clients:
            client.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        for client in self._clients:
            client.join()

    def _ask(self, url: str) -> None:
        body = json.dumps(probes.chat(self.model, _TOKENS)).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        while not self._over.is_set():
            request = urllib.request.Request(f"{url}/v1/chat/completions", data=body, headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                    response.read()
                self.answered.append(time.monotonic())
            except (OSError, urllib.error.HTTPError) as error:
                self.failed.append((time.monotonic(), f"{type(error).__name__}: {error}"))
                self._over.wait(_PAUSE_S)
