"""Chats as JSON texts: joined for a session without reading what stands in them."""

import json


def joined(history: str, messages: str) -> str:
    """The chat of a turn: `history` as `with_answer` made it, or "" for the first one, and the turn's messages.

    A system message that the turn begins with is the session's: it stands at the history's beginning already.
    """
    if not history:
        return messages
    chat = json.loads(messages)
    if chat[0]["role"] == "system":
        messages = json.dumps(chat[1:], ensure_ascii=False)
    return f"{history[:-1]},{messages[1:]}"


def with_answer(messages: str, answer: str) -> str:
    """The chat that ends with the answer to `messages`."""
    said = json.dumps({"role": "assistant", "content": answer}, ensure_ascii=False)
    return f"{messages[:-1]},{said}]"
