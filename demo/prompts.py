"""The demo's prompts: real texts with a task that a small model can do.

    .venv/bin/python -m demo.prompts FOLDER

Where the texts are from, and their licences: demo/prompt_sources.py. Columns: `row_id` (unique, and stable
while the packages keep the text), `prompt`, `source`, `task`, `language` (of the text; where the task is to
name it, the right answer).

Keeps: prompts.parquet and prompts.jsonl hold the same rows in the same order; each is replaced whole, and
left alone when it already holds these rows, so that a second run finds its input unchanged.
"""

import io
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from demo.prompt_sources import (
    EMOJI,
    Text,
    airflow_config,
    airflow_ui,
    excerpt,
    first_by_hash,
    python_docstrings,
    python_topics,
    readmes,
)

COLUMNS = ("row_id", "prompt", "source", "task", "language")
INSTRUCTIONS = {
    "summarise": "Summarise this text in one sentence.",
    "topic": "Name the topic of this text in a few words.",
    "answer": "Answer from the text: what is the default value, and what is it for?",
    "language": "In which language is this text written?",
    "purpose": "Say in one sentence what this text is about.",
}

# Lengths in characters. English takes SmolLM2's tokenizer about 4 characters a token; Thai or Korean take
# two tokens or more a character, so texts in other scripts are short.
SHORT = range(250, 640)
LONG_LIMITS = (2400, 2800, 3200, 3600, 4000, 4400, 4800, 5200)  # some 600 to 1,300 tokens
SENTENCE = range(30, 75)
NON_LATIN = ("ar", "el", "he", "hi", "ja", "ko", "ru", "th", "zh-CN", "zh-TW")


@dataclass(frozen=True)
class Row:
    """One prompt."""

    row_id: str
    prompt: str
    source: str
    task: str
    language: str


def rows() -> list[Row]:
    """All prompts, the same in the same environment, in an order that mixes the sources."""
    topics = list(python_topics())
    long_topics = [text for text in topics if len(text.text) > LONG_LIMITS[-1]]
    long = first_by_hash(long_topics, len(LONG_LIMITS))
    short_topics = [text for text in topics if text not in long]
    chosen = [_row(text, "summarise", limit) for text, limit in zip(long, LONG_LIMITS, strict=True)]
    chosen += [_row(text, "topic", SHORT[-1]) for text in first_by_hash(short_topics, 60)]
    docstrings = [text for text in python_docstrings() if len(text.text) in SHORT and ">>>" not in text.text]
    chosen += [_row(text, "summarise") for text in first_by_hash(docstrings, 75)]
    options = [text for text in airflow_config() if len(text.text) in SHORT]
    chosen += [_row(text, "answer") for text in first_by_hash(options, 65)]
    chosen += [_row(text, "language") for text in _sentences()]
    chosen += [_row(text, "purpose") for text in _readme_paragraphs()]
    distinct = {row.prompt: row for row in reversed(chosen)}
    return sorted(distinct.values(), key=lambda row: (row.row_id.rpartition("/")[2], row.row_id))


def write(folder: Path, at_most: int | None = None) -> int:
    """Leave prompts.parquet and prompts.jsonl in `folder`; returns the number of rows.

    Args:
        at_most: only so many, from the beginning; they are as mixed as all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts = rows()[:at_most]
    _replace(folder / "prompts.parquet", _parquet(prompts))
    _replace(folder / "prompts.jsonl", _jsonl(prompts))
    return len(prompts)


def _sentences() -> list[Text]:
    """Some sentences of each language of Airflow's user interface; more where the script is another."""
    by_language: dict[str, list[Text]] = {}
    for text in airflow_ui():
        dense = text.language in ("ja", "ko", "zh-CN", "zh-TW")  # a word is one to three characters
        if len(text.text) * (2 if dense else 1) in SENTENCE:
            by_language.setdefault(text.language, []).append(text)
    return [
        text
        for language, texts in by_language.items()
        for text in first_by_hash(texts, 4 if language in NON_LATIN else 1)
    ]


def _readme_paragraphs() -> list[Text]:
    paragraphs = [text for text in readmes() if len(text.text) < SHORT[-1]]
    with_emoji = [text for text in paragraphs if EMOJI.search(text.text)]
    without = [text for text in paragraphs if text not in with_emoji and len(text.text) in SHORT]
    return first_by_hash(with_emoji, 20) + first_by_hash(without, 30)


def _row(text: Text, task: str, limit: int | None = None) -> Row:
    body = excerpt(text.text, limit) if limit else text.text
    return Row(
        row_id=f"{text.source}/{text.name}",
        prompt=f"{INSTRUCTIONS[task]}\n\n{body}",
        source=text.source,
        task=task,
        language=text.language,
    )


def _parquet(prompts: Iterable[Row]) -> bytes:
    table = pa.Table.from_pylist(
        [vars(row) for row in prompts], schema=pa.schema([(name, pa.string()) for name in COLUMNS])
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _jsonl(prompts: Iterable[Row]) -> bytes:
    return "".join(json.dumps(vars(row), ensure_ascii=False) + "\n" for row in prompts).encode()


def _replace(path: Path, content: bytes) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


if __name__ == "__main__":
    print(f"{write(Path(sys.argv[1]))} rows in {sys.argv[1]}")
