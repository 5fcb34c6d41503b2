"""One row on its way: asked as `Row`, finished as `Result`."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["answered", "failed"]


@dataclass(frozen=True, slots=True)
class Row:
    """A row to ask."""

    id: str
    messages: str
    """The chat as JSON text, as the engine gets it."""
    prompt_tokens: int
    """As counted by prepare."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished row: answered, or failed by its own fault. Final for the batch."""

    id: str
    status: Status
    answer: str | None
    """None when failed; an empty answer is an answer."""
    error_class: str | None
    error_message: str | None
    finish_reason: str | None
    """The engine's: `stop`, or `length` for an answer that was cut off."""
    prompt_tokens: int
    completion_tokens: int
    latency_s: float
    """Of the request that finished it."""
    worker: str | None
    attempts: int
    """Requests sent for it, the last one included; 0 when it was never sent."""
    release_id: str

    def to_json(self) -> bytes:
        """UTF-8 without line breaks."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, document: bytes) -> "Result":
        """The inverse of `to_json`."""
        return cls(**json.loads(document))
