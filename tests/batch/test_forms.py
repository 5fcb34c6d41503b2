"""The forms of the input and of the output: what a row may say for itself, and OpenAI's batch format."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tasks.batch import formats, ids, input, openai_batch, parts, prepared, prepared_part
from tasks.batch.asked import asked_of
from tasks.batch.parts import InputRow
from tasks.batch.prompts import BadRow, chat_of
from tasks.errors import InputError
from tasks.spec import Batch
from tests.batch.world import tokenizer_folder

CHAT = [{"role": "user", "content": "hello there"}]


def request(custom_id: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "whatever", "messages": CHAT, **body},
    }


def lines(path: Path, documents: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def spec(path: Path, **changes: Any) -> Batch:
    defaults = {"input": str(path), "output": "/o", "id": "id", "prompt": "text"}
    return Batch.model_validate({**defaults, **changes})


def prepare(batch: Batch, tmp_path: Path) -> list[dict[str, Any]]:
    """The prepared rows."""
    folder, draft = tmp_path / "batch", tmp_path / "draft"
    folder.mkdir()
    draft.mkdir()
    model, cut = tokenizer_folder(tmp_path / "model"), parts.cut(input.check(batch), 2)
    for part in cut:
        prepared_part.write(part, batch, model, draft)
    written = [prepared_part.path_of(part, draft) for part in cut]
    ids.prove(batch, cut, written)
    made = prepared.publish(folder, {}, written)
    return [row for part in made.parts for row in pq.read_table(part).to_pylist()]


def test_an_openai_batch_is_read_with_its_own_sampling_and_schema(tmp_path):
    schema = {"type": "object"}
    json_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    path = lines(
        tmp_path / "in.jsonl",
        [
            request("a", max_completion_tokens=7, temperature=0),
            request("b", response_format=json_schema),
            request("c", tools=[{}]),
            {**request("d"), "url": "/v1/embeddings"},
            request("e", n=2),
        ],
    )
    batch = spec(path, format="openai_batch", prompt=None)
    rows = prepare(batch, tmp_path)
    assert [row["id"] for row in rows] == list("abcde")
    assert json.loads(rows[0]["messages"]) == CHAT
    assert (rows[0]["max_tokens"], json.loads(rows[0]["sampling"])) == (
        7,
        {"max_tokens": 7, "temperature": 0},
    )
    assert (rows[1]["max_tokens"], json.loads(rows[1]["schema"])) == (512, schema)
    errors = [(row["error_class"], row["error_message"]) for row in rows[2:]]
    assert errors[0] == ("UnsupportedField", "body.tools is not supported; leave it out")
    assert errors[1][0] == "UnsupportedRequest"
    assert errors[2] == ("UnsupportedField", "body.n is not supported; leave it out")


def test_an_openai_batch_names_no_columns(tmp_path):
    with pytest.raises(ValueError, match="leave out prompt"):
        spec(tmp_path, format="openai_batch")


def test_a_row_that_failed_is_again_a_request_of_an_openai_batch():
    row = {"id": "a", "error_class": "KillsEngine", "error_message": "why"}
    asked = {"messages": json.dumps(CHAT), "sampling": '{"max_tokens":7}', "schema": '{"type":"object"}'}

    class Spec:
        batch = spec(Path("/i"), format="openai_batch", prompt=None)

    again = formats._as_input({**asked, "session": None}, row, Spec)  # type: ignore[arg-type]
    assert openai_batch.body_of(again) == (CHAT, {"max_tokens": 7}, {"type": "object"})
    assert again["custom_id"] == "a"


def test_a_published_row_is_a_response_of_an_openai_batch():
    row = {
        "id": "a",
        "status": "length",
        "answer": "yes",
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "release_id": "r",
    }
    line = openai_batch.response_line(row)
    assert line["custom_id"] == "a"
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "yes"
    assert line["response"]["body"]["usage"]["total_tokens"] == 5
    failed = {**row, "status": "failed", "error_class": "BadRequest", "error_message": "no"}
    line = openai_batch.response_line(failed)
    assert (line["response"], line["error"]) == (None, {"code": "BadRequest", "message": "no"})


def test_a_rows_own_sampling_and_schema_are_checked_before_a_device_is_taken(tmp_path):
    batch = spec(tmp_path, row_sampling="how", row_schema="form")

    def asked(sampling: Any = None, schema: Any = None) -> Any:
        return asked_of(InputRow("a", "hello", "line 1", None, sampling, schema), batch)

    assert asked('{"max_tokens": 3}').sampling == {"max_tokens": 3}
    assert asked({"max_tokens": None, "seed": 1}).sampling == {"seed": 1}
    assert asked({"max_token": 3}).error_class == "BadSampling"
    assert asked({"temperature": 9}).error_message.startswith("the row's own sampling: temperature")
    assert asked("no JSON").error_class == "BadSampling"
    assert asked(None, {"type": "object"}).schema == {"type": "object"}
    assert asked(None, {"type": "nonsense"}).error_class == "BadSchema"
    assert asked("", "").error_class is None


HALF = "\ud83d"
"""Of a pair of surrogates: what is left of an emoji that was cut in two."""


@pytest.mark.parametrize(
    ("odd", "error_class"),
    [
        ({"how": {"max_tokens": 2**31}}, "BadSampling"),
        ({"how": {"max_tokens": 2**31 - 1}}, "BadSampling"),
        ({"how": "[" * 100_000}, "BadSampling"),
        ({"form": {"$schema": ["draft 7"]}}, "BadSchema"),
        ({"form": '{"not":' * 300 + "{}" + "}" * 300}, "BadSchema"),
        ({"form": {"enum": [HALF]}}, None),
        ({"chat": [{"role": HALF, "content": "hello"}]}, None),
        ({"chat": [{"role": "user", "content": [{"type": HALF}]}]}, "UnsupportedContent"),
        ({"chat": "[" * 100_000}, "BadMessages"),
    ],
    ids=[
        "more-than-32-bits",
        "just-32-bits",
        "deep-sampling",
        "schema-of-no-draft",
        "deep-schema",
        "half-a-schema",
        "half-a-role",
        "half-a-kind",
        "deep-chat",
    ],
)
def test_an_odd_value_in_one_row_is_that_rows_alone(tmp_path, odd, error_class):
    plain = {"chat": CHAT, "how": None, "form": None}
    path = lines(
        tmp_path / "in.jsonl", [{"id": "a", **plain}, {"id": "b", **plain, **odd}, {"id": "c", **plain}]
    )
    made = prepare(spec(path, prompt=None, messages="chat", row_sampling="how", row_schema="form"), tmp_path)
    assert [row["error_class"] for row in made] == [None, error_class, None]


def test_sessions_that_are_named_by_halves_of_characters_stay_apart(tmp_path):
    documents = [{"id": n, "text": "hello", "who": who} for n, who in enumerate((HALF, "\ud83e", HALF, "?"))]
    rows = prepare(spec(lines(tmp_path / "in.jsonl", documents), session="who"), tmp_path)
    first, other, again, mark = (row["session"] for row in rows)
    assert first == again
    assert len({first, other, mark}) == 3


def test_an_id_that_cannot_be_stored_is_a_bad_id(tmp_path):
    path = lines(tmp_path / "in.jsonl", [{"id": one, "text": "hello"} for one in ("a", f"b{HALF}")])
    assert [row["id"] for row in prepare(spec(path, bad_ids="keep_apart"), tmp_path)] == ["a", "row-2"]
    (tmp_path / "strict").mkdir()
    with pytest.raises(InputError, match=r"surrogate.* in\.jsonl, line 2"):
        prepare(spec(path), tmp_path / "strict")


def test_image_parts_are_a_typed_refusal():
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(BadRow) as caught:
        chat_of(chat, spec(Path("/i"), format="openai_batch", prompt=None))
    assert caught.value.error_class == "UnsupportedContent"


def test_rows_with_bad_ids_are_kept_apart_where_the_spec_says_so(tmp_path):
    documents = [{"id": one, "text": "hello"} for one in ("a", None, "a", "b", "a")]
    path = lines(tmp_path / "in.jsonl", documents)
    rows = prepare(spec(path, bad_ids="keep_apart"), tmp_path)
    assert [row["id"] for row in rows] == ["a", "row-2", "a#2", "b", "a#3"]
    (tmp_path / "strict").mkdir()
    with pytest.raises(InputError, match="keep_apart"):
        prepare(spec(path), tmp_path / "strict")


def test_sessions_and_long_beginnings_are_noted(tmp_path):
    documents = [
        {"id": 1, "text": "x" * 2000 + " one", "who": "s"},
        {"id": 2, "text": "x" * 2000 + " two", "who": None},
        {"id": 3, "text": "short", "who": 7},
    ]
    rows = prepare(spec(lines(tmp_path / "in.jsonl", documents), session="who"), tmp_path)
    assert [row["session"] for row in rows] == ["s", None, "7"]
    assert rows[0]["prefix"] == rows[1]["prefix"] is not None
    assert rows[2]["prefix"] is None
