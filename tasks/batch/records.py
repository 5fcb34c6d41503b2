"""One row on its way: asked as `Row`, finished as `Result`."""

import json
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Literal

Status = Literal["answered", "empty", "length", "failed"]
"""`empty`: answered with nothing. `length`: answered, and cut off at its longest. Only `failed` has no answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row to ask."""

    id: str
    messages: str
    """The chat as JSON text, as the engine gets it; of a session, this turn's messages alone."""
    prompt_tokens: int
    """As counted by prepare."""
    max_tokens: int = 512
    """Longest answer."""
    sampling: str | None = None
    """The row's own sampling, as a JSON object; None: the batch's."""
    schema: str | None = None
    """The row's own JSON schema, as JSON text; None: the batch's."""
    session: str | None = None
    """Rows of one session come one after the other, in the order of their turns."""
    prefix: int | None = None
    """The same for rows that begin alike for long."""
    finished: str | None = None
    """Of a turn that is not to be asked again: its answer as a JSON text, or `null` when it has none."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished row: answered, or failed by its own fault. Final for the batch."""

    id: str
    status: Status
    answer: str | None
    """None when failed."""
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
        # Written out: a general encoder took a tenth of a request's time. JSON knows no other text than this.
        return (
            f'{{"id":{_text(self.id)},"status":"{self.status}","answer":{_text(self.answer)},'
            f'"error_class":{_text(self.error_class)},"error_message":{_text(self.error_message)},'
            f'"finish_reason":{_text(self.finish_reason)},"prompt_tokens":{self.prompt_tokens},'
            f'"completion_tokens":{self.completion_tokens},"latency_s":{self.latency_s},'
            f'"worker":{_text(self.worker)},"attempts":{self.attempts},"release_id":{_text(self.release_id)}}}'
        ).encode()

    @classmethod
    def from_json(cls, document: bytes) -> "Result":
        """The inverse of `to_json`."""
        return cls(**json.loads(document))


def _text(value: str | None) -> str:
    return "null" if value is None else encode_basestring(value)
