"""What the tiny model learns from: texts that ship with Python, as running text and as chat.

The texts are those of demo/prompt_sources.py that need no Airflow. One in twenty, chosen by the hash of its
name, is held out: neither the tokenizer nor the model sees it before the perplexity is measured on it.
"""

from dataclasses import dataclass
from hashlib import sha256

from demo.prompt_sources import Text, excerpt, python_docstrings, python_topics

END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END)

_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Texts to learn from, with special tokens in them, and plain texts to measure on."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]


def corpus() -> Corpus:
    """The same texts in the same order for the same Python."""
    texts = [*python_topics(), *python_docstrings()]
    training = [text for text in texts if not _is_held_out(text)]
    return Corpus(
        training=tuple([f"{text.text}{END_OF_TEXT}" for text in training] + list(map(_as_chat, training))),
        held_out=tuple(f"{text.text}{END_OF_TEXT}" for text in texts if _is_held_out(text)),
    )


def chat(question: str, answer: str) -> str:
    """One turn as the chat template writes it."""
    return f"{START}user\n{question}{END}\n{START}assistant\n{answer}{END}\n"


def _as_chat(text: Text) -> str:
    """A question whose answer the text itself holds: its first line sums it up, or its name is its topic."""
    if text.source == "python-docstrings":
        summary, _, rest = text.text.partition("\n\n")
        return chat(f"Summarise this text in one sentence.\n\n{excerpt(rest or summary, 400)}", summary)
    return chat(f"Name the topic of this text in a few words.\n\n{excerpt(text.text, 400)}", text.name)


def _is_held_out(text: Text) -> bool:
    return sha256(text.name.encode()).digest()[0] < 256 / _HELD_OUT_ONE_IN
