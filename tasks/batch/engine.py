"""One request to one worker, and whose fault it was when it went wrong.

Four outcomes: answered; refused, which is the row's own fault and final; unfit, an answer that is not what the
schema asks for, which another draw may cure; trouble, which is the engine's or the way's and says nothing about
the row (invariant 6), so the row is asked again.
"""

import json
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import count
from typing import Any
from uuid import uuid4

import aiohttp
from yarl import URL

from tasks.batch.records import Row

_MESSAGE_CHARACTERS = 500
"""Of an error message that is kept; engines like to repeat the whole prompt."""

_TOO_LONG = ("maximum context length", "max_model_len", "is too long", "longer than the maximum")
"""How vLLM's versions say that prompt and answer do not fit."""

_HEADS = 1024
"""Rows with sampling or a schema of their own come in few kinds; the kinds that are kept at hand."""


_NAME = "X-Request-Id"
_ANSWER_NAME = "chatcmpl-"
"""vLLM names its answer by this and the request's own name."""


@dataclass(frozen=True)
class Asking:
    """What is the same for all requests of a batch."""

    model: str
    """The release's id, under which every worker of the pool serves."""
    sampling: dict[str, Any]
    """As the engine's API calls it: max_tokens, temperature, top_p, seed."""
    schema: dict[str, Any] | None
    """JSON schema of the answers that have none of their own."""
    key: str = field(repr=False)
    """The pool's."""
    max_model_len: int | None = None
    """Where prompts that do not fit are cut: the longest prompt and answer. None: the engine refuses them."""

    def head(self, row: Row) -> bytes:
        """A request's body without its messages and closing brace."""
        return self._head(row.sampling, row.schema, row.max_tokens)

    @lru_cache(_HEADS)  # noqa: B019 - one object for a process's whole work
    def _head(self, sampling: str | None, schema: str | None, max_tokens: int) -> bytes:
        own = json.loads(sampling) if sampling else {}
        body: dict[str, Any] = {"model": self.model, "stream": False, **self.sampling, **own}
        wanted = json.loads(schema) if schema else self.schema
        if wanted is not None:
            named = {"name": "answer", "schema": wanted, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        if self.max_model_len is not None:
            body["truncate_prompt_tokens"] = max(1, self.max_model_len - max_tokens)
        return json.dumps(body)[:-1].encode()

    def __hash__(self) -> int:
        return id(self)


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


@dataclass(frozen=True, slots=True)
class Unfit:
    """An answer that the schema refuses; final when it is the last of the draws that a row has."""

    error_class: str
    message: str
    answered: Answered


class Fault(Enum):
    """What kind of trouble, by what it means for the worker and for the row."""

    UNREACHED = "unreached"
    """The request did not arrive, or was turned away: the row had no part in it."""
    BUSY = "busy"
    """429 or 503: the worker is well and full."""
    LOST = "lost"
    """The worker went away with the row in it: perhaps because of the row."""
    SILENT = "silent"
    """No answer within the row's time: perhaps because of the row."""
    ERROR = "error"
    """The worker answered that it failed: perhaps because of the row."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The request brought no answer, and that says nothing about the row yet."""

    fault: Fault
    message: str
    retry_after_s: float | None = None
    """When the worker said it may be asked again."""


Outcome = Answered | Refused | Unfit | Trouble


class Engine:
    """Asks workers over HTTP; connections are kept."""

    def __init__(self, session: aiohttp.ClientSession, asking: Asking) -> None:
        self._session = session
        self._asking = asking
        self._headers = {
            "Authorization": f"Bearer {asking.key}",
            "Content-Type": "application/json",
        }
        self._names = map(f"{uuid4().hex}-{{}}".format, count())
        self._in_flight: set[str] = set()
        """Names of the requests that are out."""
        self._validator = _validator(json.dumps(asking.schema)) if asking.schema is not None else None

    async def ask(self, url: URL, row: Row, messages: str, timeout_s: float) -> Outcome:
        """Send `row` to the worker at `url` and wait for its answer.

        Args:
            messages: the chat as JSON text: the row's, after those before it where it is a turn of a session.
            timeout_s: from sending it to the last byte of its answer.
        """
        body = b"".join((self._asking.head(row), b',"messages":', messages.encode(), b"}"))
        name = next(self._names)
        self._in_flight.add(name)
        try:
            return await self._post(url, row, body, name, timeout_s)
        finally:
            self._in_flight.discard(name)

    async def _post(self, url: URL, row: Row, body: bytes, name: str, timeout_s: float) -> Outcome:
        headers = {**self._headers, _NAME: name}
        try:
            async with self._session.post(
                url, data=body, headers=headers, timeout=_timeout(timeout_s)
            ) as response:
                content = await response.read()
                status, retry_after = response.status, response.headers.get("Retry-After")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return Trouble(Fault.UNREACHED, f"no connection ({type(error).__name__})")
        except TimeoutError:
            return Trouble(Fault.SILENT, f"no answer within {timeout_s:.0f} s")
        except (aiohttp.ClientError, ConnectionError) as error:
            return Trouble(Fault.LOST, f"the connection ended before the answer ({type(error).__name__})")
        if status == 200:
            return self._answer(content, row, name)
        return _failure(status, content, retry_after)

    def _answer(self, content: bytes, row: Row, name: str) -> Outcome:
        try:
            document = json.loads(content)
            choice = document["choices"][0]
            text = choice["message"]["content"] or ""
            usage = document.get("usage") or {}
            answered = Answered(
                # A lone surrogate escape is valid JSON, but no text that can be stored.
                text if text.isascii() else text.encode("utf-8", "replace").decode(),
                choice.get("finish_reason"),
                int(usage.get("prompt_tokens") or row.prompt_tokens),
                int(usage.get("completion_tokens") or 0),
            )
            model = document.get("model")
            answered_name = str(document.get("id")).removeprefix(_ANSWER_NAME)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return Trouble(Fault.ERROR, f"the answer is not a chat completion ({type(error).__name__})")
        if model != self._asking.model:
            return Trouble(Fault.UNREACHED, f"the worker serves {model!r}, not {self._asking.model!r}")
        # An engine that does not repeat the name says nothing; another request's is another row's answer.
        if answered_name != name and answered_name in self._in_flight:
            return Trouble(Fault.ERROR, "the worker answered with another request's answer")
        validator = _validator(row.schema) if row.schema is not None else self._validator
        return answered if validator is None else _validated(answered, validator)


def _validated(answered: Answered, validator: Any) -> Answered | Refused | Unfit:
    # Before parsing: a cut-off document can be repaired into a wrong one.
    if answered.finish_reason == "length":
        message = "the answer reached max_tokens before its JSON was complete"
        return Unfit("AnswerCutOff", message, answered)
    try:
        problem = next(iter(validator.iter_errors(json.loads(answered.text))), None)
    except ValueError:
        return Unfit("InvalidAnswer", "the answer is not JSON", answered)
    except RecursionError:
        return Refused("InvalidAnswer", "the answer or the schema is nested too deeply to be checked")
    return answered if problem is None else Unfit("InvalidAnswer", _short(problem.message), answered)


@lru_cache(_HEADS)
def _validator(schema: str) -> Any:
    from jsonschema.validators import validator_for

    document = json.loads(schema)
    return validator_for(document)(document)


@lru_cache(_HEADS)
def _timeout(total_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total_s, sock_connect=10)


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
