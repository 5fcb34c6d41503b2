"""One request to one worker, and whose fault it was when it went wrong.

Three outcomes: answered; refused, which is the row's own fault and final; trouble, which is the engine's or
the way's and says nothing about the row (invariant 6), so the row is asked again.
"""

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import aiohttp

from tasks.batch.records import Row

_MESSAGE_CHARACTERS = 500
"""Of an error message that is kept; engines like to repeat the whole prompt."""

_TOO_LONG = ("maximum context length", "max_model_len", "is too long", "longer than the maximum")
"""How vLLM's versions say that prompt and answer do not fit."""


@dataclass(frozen=True)
class Asking:
    """What is the same for all requests of a batch."""

    model: str
    """The release's id, under which every worker of the pool serves."""
    sampling: dict[str, Any]
    """As the engine's API calls it: max_tokens, temperature, top_p, seed."""
    schema: dict[str, Any] | None
    """JSON schema of the answer."""
    timeout_s: float
    """Of one request, from sending it to the last byte of its answer."""
    key: str = field(repr=False)
    """The pool's."""

    def head(self) -> str:
        """The request's body without its messages and closing brace."""
        body: dict[str, Any] = {"model": self.model, "stream": False, **self.sampling}
        if self.schema is not None:
            named = {"name": "answer", "schema": self.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return json.dumps(body)[:-1]


@dataclass(frozen=True, slots=True)
class Answered:
    """The engine's answer."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The row cannot be answered, now or later."""

    error_class: str
    message: str


class Fault(Enum):
    """What kind of trouble, by what it means for the worker and for the row."""

    UNREACHED = "unreached"
    """The request did not arrive, or was turned away: the row had no part in it."""
    BUSY = "busy"
    """429 or 503: the worker is well and full."""
    LOST = "lost"
    """The worker went away, or was silent too long, with the row in it: perhaps because of the row."""
    ERROR = "error"
    """The worker answered that it failed: perhaps because of the row."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The request brought no answer, and that says nothing about the row yet."""

    fault: Fault
    message: str
    retry_after_s: float | None = None
    """When the worker said it may be asked again."""


class Engine:
    """Asks workers over HTTP; connections are kept."""

    def __init__(self, session: aiohttp.ClientSession, asking: Asking) -> None:
        self._session = session
        self._asking = asking
        self._head = asking.head().encode()
        self._headers = {
            "Authorization": f"Bearer {asking.key}",
            "Content-Type": "application/json",
        }
        self._timeout = aiohttp.ClientTimeout(total=asking.timeout_s, sock_connect=10)
        self._validator = _validator(asking.schema)

    async def ask(self, url: str, row: Row) -> Answered | Refused | Trouble:
        """Send `row` to the worker at `url` and wait for its answer."""
        body = b"".join((self._head, b',"messages":', row.messages.encode(), b"}"))
        try:
            async with self._session.post(
                f"{url}/v1/chat/completions", data=body, headers=self._headers, timeout=self._timeout
            ) as response:
                content = await response.read()
                status, retry_after = response.status, response.headers.get("Retry-After")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return Trouble(Fault.UNREACHED, f"no connection ({type(error).__name__})")
        except TimeoutError:
            return Trouble(Fault.LOST, f"no answer within {self._asking.timeout_s:.0f} s")
        except (aiohttp.ClientError, ConnectionError) as error:
            return Trouble(Fault.LOST, f"the connection ended before the answer ({type(error).__name__})")
        if status == 200:
            return self._answer(content, row)
        return _failure(status, content, retry_after)

    def _answer(self, content: bytes, row: Row) -> Answered | Refused | Trouble:
        try:
            document = json.loads(content)
            choice = document["choices"][0]
            text = choice["message"]["content"] or ""
            usage = document.get("usage") or {}
            answered = Answered(
                # A lone surrogate escape is valid JSON, but no text that can be stored.
                text.encode("utf-8", "replace").decode(),
                choice.get("finish_reason"),
                int(usage.get("prompt_tokens") or row.prompt_tokens),
                int(usage.get("completion_tokens") or 0),
            )
            model = document.get("model")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return Trouble(Fault.ERROR, f"the answer is not a chat completion ({type(error).__name__})")
        if model != self._asking.model:
            return Trouble(Fault.UNREACHED, f"the worker serves {model!r}, not {self._asking.model!r}")
        if self._validator is None:
            return answered
        # Before parsing: a cut-off document can be repaired into a wrong one.
        if answered.finish_reason == "length":
            return Refused("AnswerCutOff", "the answer reached max_tokens before its JSON was complete")
        return self._validated(answered)

    def _validated(self, answered: Answered) -> Answered | Refused:
        assert self._validator is not None
        try:
            problem = next(iter(self._validator.iter_errors(json.loads(answered.text))), None)
        except ValueError:
            return Refused("InvalidAnswer", "the answer is not JSON")
        return answered if problem is None else Refused("InvalidAnswer", _short(problem.message))


def _validator(schema: dict[str, Any] | None) -> Any:
    if schema is None:
        return None
    from jsonschema.validators import validator_for

    return validator_for(schema)(schema)


def _failure(status: int, content: bytes, retry_after: str | None) -> Refused | Trouble:
    message = _message(content)
    if status in (429, 503):
        return Trouble(Fault.BUSY, f"HTTP {status}: {message}", _seconds(retry_after))
    if status in (400, 413, 422):
        too_long = any(words in message for words in _TOO_LONG)
        return Refused("PromptTooLong" if too_long else "BadRequest", message)
    if status in (401, 403, 404):
        return Trouble(
            Fault.UNREACHED, f"the worker turned the key or the model away: HTTP {status}: {message}"
        )
    return Trouble(Fault.ERROR, f"HTTP {status}: {message}")


def _message(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    try:
        document = json.loads(text)
        error = document.get("error", document)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return _short(text)


def _short(text: str) -> str:
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]} ..."


def _seconds(retry_after: str | None) -> float | None:
    """Of a Retry-After header in seconds; its other form, a date, is not what engines send."""
    try:
        return max(0.0, float(retry_after)) if retry_after is not None else None
    except ValueError:
        return None
