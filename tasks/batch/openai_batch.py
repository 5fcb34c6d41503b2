"""The format of OpenAI's batch API: a request in each line of the input, a response in each line of the output.

What a request asks for and this pipeline cannot give is a typed error of that row, never left out silently.
"""

from typing import Any

from tasks.batch.prompts import BadRow

URL = "/v1/chat/completions"

_SAMPLING = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
}
"""Fields of a request's body, and what they are called here."""

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "model": (),
    "user": (),
    "metadata": (),
    "store": (),
    "n": (1, None),
    "stream": (False, None),
}
"""Fields that change no answer: always, or with these values."""


def body_of(request: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """Chat, own sampling and own JSON schema (or None) of a request.

    Raises:
        BadRow: it is not a request for a chat completion, or asks for what is not supported.
    """
    if request.get("method", "POST") != "POST" or request.get("url", URL) != URL:
        raise BadRow("UnsupportedRequest", f"only POST {URL} is answered, not {request.get('url')!r}")
    body = request.get("body")
    if not isinstance(body, dict):
        raise BadRow("UnsupportedRequest", "the request has no body")
    sampling: dict[str, Any] = {}
    schema = None
    for name, value in body.items():
        if name in _SAMPLING:
            if value is not None:
                sampling[_SAMPLING[name]] = value
        elif name == "response_format":
            schema = _schema_of(value)
        elif name != "messages" and not _has_no_effect(name, value):
            raise BadRow("UnsupportedField", f"body.{name} is not supported; leave it out")
    return body.get("messages"), sampling, schema


def response_line(row: dict[str, Any]) -> dict[str, Any]:
    """A published row as a line of a batch's output."""
    if row["status"] == "failed":
        error = {"code": row["error_class"], "message": row["error_message"]}
        return {"id": f"batch_req_{row['id']}", "custom_id": row["id"], "response": None, "error": error}
    message = {"role": "assistant", "content": row["answer"]}
    prompt_tokens, completion_tokens = row["prompt_tokens"], row["completion_tokens"]
    body = {
        "id": f"chatcmpl-{row['id']}",
        "object": "chat.completion",
        "model": row["release_id"],
        "choices": [{"index": 0, "message": message, "finish_reason": row["finish_reason"]}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    response = {"status_code": 200, "request_id": row["id"], "body": body}
    return {"id": f"batch_req_{row['id']}", "custom_id": row["id"], "response": response, "error": None}


def _schema_of(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_schema" and isinstance(value.get("json_schema"), dict):
        return value["json_schema"].get("schema")
    if kind == "json_object":
        return {"type": "object"}
    raise BadRow("UnsupportedField", "body.response_format is neither text, json_object nor json_schema")


def _has_no_effect(name: str, value: Any) -> bool:
    return name in _WITHOUT_EFFECT and (not _WITHOUT_EFFECT[name] or value in _WITHOUT_EFFECT[name])
