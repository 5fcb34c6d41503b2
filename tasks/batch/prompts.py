"""From a row of the input to the chat that is sent, and how many tokens that is.

Tokens are counted as the engine will: the model's own chat template is rendered with the environment that
transformers uses, and the result encoded with the model's own tokenizer. Where the model has no template,
or it cannot be rendered here, the template's share is taken as a constant for each message; then a prompt
that is too long by a few tokens is refused by the engine instead of here.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tasks.errors import StageFailed
from tasks.spec import Batch

Message = dict[str, Any]

_TEMPLATE_TOKENS = 8
"""Around each message and before the answer: Qwen's templates take 5 and 3."""


class BadRow(Exception):
    """A row that cannot be asked as it stands."""

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class


def chat_of(text: Any, batch: Batch) -> list[Message]:
    """The chat that `text`, a value of the column `prompt` or `messages`, stands for.

    Raises:
        BadRow: it is missing, not a chat, or holds something else than text.
    """
    if batch.prompt is None:
        return _messages(text)
    if not isinstance(text, str) or not text.strip():
        raise BadRow("NoPrompt", f"column {batch.prompt!r} holds no text")
    system = [{"role": "system", "content": batch.system}] if batch.system else []
    return [*system, {"role": "user", "content": storable(text)}]


def storable(text: str) -> str:
    """A lone surrogate is valid in JSON, but in no text that can be stored or sent."""
    return text.encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class TokenCounter:
    """Counts prompt tokens for one model."""

    tokenizer: Tokenizer
    render: Callable[[list[Message]], str] | None
    """None where the template's share is estimated."""

    @classmethod
    def of_model(cls, folder: Path) -> "TokenCounter":
        """The counter for the model whose files are in `folder`.

        Raises:
            StageFailed: there is no readable tokenizer.json.
        """
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise StageFailed(
                f"the model's tokenizer {path} cannot be read ({error}); run the stage download again"
            ) from None
        return cls(tokenizer, _renderer(folder))

    def count(self, chats: Sequence[list[Message]]) -> list[int]:
        """Prompt tokens of each chat."""
        texts, extra = [], []
        for chat in chats:
            rendered = self._rendered(chat)
            texts.append(rendered if rendered is not None else "".join(str(m["content"]) for m in chat))
            extra.append(0 if rendered is not None else _TEMPLATE_TOKENS * (len(chat) + 1))
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [len(one.ids) + more for one, more in zip(encoded, extra, strict=True)]

    def _rendered(self, chat: list[Message]) -> str | None:
        if self.render is None:
            return None
        try:
            return self.render(chat)
        except Exception:
            # A template is the model's own program and may raise anything; the engine then says what is
            # wrong.
            return None


def _messages(value: Any) -> list[Message]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRow("BadMessages", "the chat is a text, but not JSON") from None
        except RecursionError:
            raise BadRow("BadMessages", "the chat is nested too deeply") from None
    if not isinstance(value, list) or not value:
        raise BadRow("BadMessages", "a chat is a list of {role, content} with at least one entry")
    chat = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow("BadMessages", f"message {number} has no role")
        content = message.get("content")
        if isinstance(content, list):
            kinds = sorted({str(part.get("type")) for part in content if isinstance(part, dict)})
            raise BadRow(
                "UnsupportedContent",
                f"message {number} holds parts of type {', '.join(kinds)}; only plain text is supported",
            )
        if not isinstance(content, str):
            raise BadRow("BadMessages", f"message {number} has no text")
        chat.append({"role": storable(message["role"]), "content": storable(content)})
    return chat


def _renderer(folder: Path) -> Callable[[list[Message]], str] | None:
    config = _config(folder)
    source = _template(folder, config)
    if source is None:
        return None
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        return None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        template = environment.from_string(source)
    except TemplateError:
        return None
    special = {
        name: _token(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    return lambda chat: template.render(messages=chat, add_generation_prompt=True, **special)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    return template if isinstance(template, str) else None


def _token(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
