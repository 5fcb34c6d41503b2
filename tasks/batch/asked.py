"""From a row of the input to what is asked: its chat, its own sampling and its own schema, or why it cannot be."""

from dataclasses import dataclass, field
from typing import Any

from tasks.batch import openai_batch, own
from tasks.batch.parts import InputRow
from tasks.batch.prompts import BadRow, Message, chat_of
from tasks.spec import Batch


@dataclass(frozen=True, slots=True)
class Asked:
    """A row of the input, as it will be asked."""

    chat: list[Message] | None
    """None when it cannot be asked."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """What of the sampling is the row's own."""
    schema: dict[str, Any] | None = None
    """The row's own."""
    error_class: str | None = None
    error_message: str | None = None


def asked_of(row: InputRow, batch: Batch) -> Asked:
    """What `row` asks; a row that cannot be asked says why."""
    text, sampling, schema = row.text, row.sampling, row.schema
    try:
        if batch.format == "openai_batch":
            text, sampling, schema = openai_batch.body_of(text)
        return Asked(chat_of(text, batch), own.sampling_of(sampling), own.schema_of(schema))
    except BadRow as error:
        return Asked(None, error_class=error.error_class, error_message=str(error))
