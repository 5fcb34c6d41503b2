"""Rows become chats, and chats are counted as the engine counts them."""

import json

import pytest

from tasks.batch.prompts import BadRow, TokenCounter, chat_of
from tasks.errors import StageFailed
from tasks.spec import Batch
from tests.batch.world import tokenizer_folder

PROMPT = Batch(input="/i", output="/o", prompt="text")
CHAT = Batch(input="/i", output="/o", messages="chat")


def test_a_prompt_is_a_chat_of_one_message_after_the_system_message():
    assert chat_of("hello", PROMPT) == [{"role": "user", "content": "hello"}]
    with_system = PROMPT.model_copy(update={"system": "be kind"})
    assert chat_of("hello", with_system)[0] == {"role": "system", "content": "be kind"}


def test_a_chat_is_a_list_or_its_json():
    chat = [{"role": "user", "content": "a", "name": None}]
    assert chat_of(chat, CHAT) == chat_of(json.dumps(chat), CHAT) == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("value", "batch", "error_class"),
    [
        (None, PROMPT, "NoPrompt"),
        ("  ", PROMPT, "NoPrompt"),
        (None, CHAT, "BadMessages"),
        ([], CHAT, "BadMessages"),
        ("not json", CHAT, "BadMessages"),
        ([{"content": "a"}], CHAT, "BadMessages"),
        ([{"role": "user", "content": None}], CHAT, "BadMessages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], CHAT, "UnsupportedContent"),
    ],
)
def test_a_row_that_is_no_chat_says_why(value, batch, error_class):
    with pytest.raises(BadRow) as caught:
        chat_of(value, batch)
    assert caught.value.error_class == error_class


def test_a_lone_surrogate_is_replaced_because_it_can_neither_be_stored_nor_sent():
    assert chat_of(json.loads('"a\\ud800b"'), PROMPT)[0]["content"] == "a?b"


def test_the_template_counts(tmp_path):
    counter = TokenCounter.of_model(tokenizer_folder(tmp_path))
    assert counter.render is not None
    assert counter.count([chat_of("one two three", PROMPT)]) == [3 + len(["start", "end", "go"])]


def test_without_a_template_its_share_is_estimated(tmp_path):
    folder = tokenizer_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert TokenCounter.of_model(folder).count([chat_of("one two three", PROMPT)]) == [3 + 16]


def test_a_template_that_refuses_a_chat_does_not_stop_the_count(tmp_path):
    folder = tokenizer_folder(tmp_path)
    template = "{{ raise_exception('no') if messages[0].content == 'bad' else messages[0].content }}"
    config = {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    counter = TokenCounter.of_model(folder)
    assert counter.count([chat_of("bad", PROMPT), chat_of("good", PROMPT)]) == [1 + 16, 1]


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path):
    folder = tokenizer_folder(tmp_path)
    attack = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": attack}))
    assert TokenCounter.of_model(folder).count([chat_of("one", PROMPT)]) == [1 + 16]


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(StageFailed, match=r"tokenizer\.json"):
        TokenCounter.of_model(tmp_path)
