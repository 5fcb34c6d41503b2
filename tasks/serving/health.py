"""Whether a worker lives: judged by the tokens that it makes, not by what its API server says.

`/health` says 200 for as long as the API server runs, also when the engine behind it hangs (vllm #2731,
#17972). So life is one of two things: the counter of tokens moved, or a request that we sent for this purpose
was answered. A worker without either for a while is asked (the canary), then suspect, then dead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.serving.probes import Look

_ASK_AFTER = 1 / 6
_SUSPECT_AFTER = 1 / 3
_SILENT_AFTER = 1 / 12
"""Parts of the silence that is allowed: no token, no token and no canary, no API server."""


@dataclass(frozen=True)
class Verdict:
    """What a worker is, and what says so."""

    state: Literal["ready", "suspect", "dead"]
    evidence: str


class Pulse:
    """What was seen of one worker since it became ready. Keeps no clock: every call brings the time."""

    def __init__(self, allowed_s: float, now_s: float) -> None:
        """
        Args:
            allowed_s: silence after which the worker is dead.
        """
        self._allowed_s = allowed_s
        self._lived_at = now_s
        self._how = "it was warmed up"
        self._answered_at = now_s
        self._tokens: int | None = None
        self._canary = ""
        self._ended: Sequence[str] = ()
        self._stopped: Sequence[str] = ()
        self._missing = ""

    def looked(self, look: Look | None, now_s: float) -> None:
        """The API server was asked; None: it did not answer."""
        if look is None:
            return
        self._answered_at = now_s
        # A counter that went back belongs to a server that began anew: as much a sign of life.
        if self._tokens is not None and look.tokens != self._tokens:
            self._lives(now_s, "its counter of tokens moves")
        self._tokens = look.tokens

    def canary_answered(self, now_s: float) -> None:
        """A request of ours came back."""
        self._lives(now_s, "it answers")

    def canary_failed(self, how: str) -> None:
        """A request of ours did not."""
        self._canary = how

    def engines(self, ended: Sequence[str], stopped: Sequence[str]) -> None:
        """Its engine's processes were looked at."""
        self._ended, self._stopped = ended, stopped

    def memory(self, missing: str) -> None:
        """Its GPU's memory was looked at; what is missing there, or an empty text."""
        self._missing = missing

    def wants_canary(self, now_s: float) -> bool:
        """Whether nothing has shown for a while that it lives."""
        return now_s - self._lived_at > self._allowed_s * _ASK_AFTER

    def verdict(self, now_s: float) -> Verdict:
        """What all that comes to."""
        quiet_s, silent_s = now_s - self._lived_at, now_s - self._answered_at
        if self._ended:
            return Verdict("dead", f"its engine has ended: {', '.join(self._ended)}")
        if silent_s > self._allowed_s:
            return Verdict("dead", f"its API server has not answered for {silent_s:.0f} s")
        if quiet_s > self._allowed_s:
            return Verdict("dead", f"{self._quiet(quiet_s)}: its engine hangs")
        if self._stopped:
            return Verdict("suspect", f"stopped by a signal (state T): {', '.join(self._stopped)}")
        if self._missing:
            return Verdict("suspect", self._missing)
        if silent_s > self._allowed_s * _SILENT_AFTER:
            return Verdict("suspect", f"its API server has not answered for {silent_s:.0f} s")
        if quiet_s > self._allowed_s * _SUSPECT_AFTER:
            return Verdict("suspect", self._quiet(quiet_s))
        return Verdict("ready", self._how)

    def _lives(self, now_s: float, how: str) -> None:
        self._lived_at, self._how, self._canary = now_s, how, ""

    def _quiet(self, quiet_s: float) -> str:
        canary = f" and {self._canary}" if self._canary else ""
        return f"no token was made for {quiet_s:.0f} s{canary}, although its API server answers"
