"""The demo's prompts: real, distinct, stable, and of the kinds that break things."""

import json
import os
import subprocess
import sys
import unicodedata
from collections import Counter

import pyarrow.parquet as pq
import pytest

from demo import prompts
from demo.prompt_sources import EMOJI, excerpt


@pytest.fixture(scope="module")
def rows():
    return prompts.rows()


@pytest.fixture
def written(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "rows", lambda: rows)  # reading the sources again takes seconds
    prompts.write(tmp_path / "written")
    return tmp_path / "written"


def is_latin(character):
    return unicodedata.name(character, "").startswith("LATIN")


def body(row):
    return row.prompt.partition("\n\n")[2]


def test_a_shorter_demo_asks_the_first_of_the_same_rows(rows, tmp_path):
    assert prompts.write(tmp_path, 60) == 60
    written = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["row_id"] for row in written] == [row.row_id for row in rows[:60]]
    assert len({row["task"] for row in written}) > 3


def test_there_are_at_least_300_rows_and_no_two_are_alike(rows):
    assert len(rows) >= 300
    assert len({row.row_id for row in rows}) == len(rows)
    assert len({row.prompt for row in rows}) == len(rows)
    assert all(body(row).strip() for row in rows)


def test_every_source_and_every_task_has_its_share(rows):
    assert all(count >= 40 for count in Counter(row.source for row in rows).values())
    assert set(Counter(row.task for row in rows)) == set(prompts.INSTRUCTIONS)
    assert len({row.source for row in rows}) == 5


def test_some_rows_are_long_and_none_is_too_long_for_2048_tokens(rows):
    # English prose of this kind takes the 135M model's tokenizer 3.5 characters a token or more.
    lengths = [len(row.prompt) for row in rows]
    assert sum(length > 3200 for length in lengths) >= 5
    assert max(lengths) < 1900 * 3.6
    assert 400 < sum(lengths) / len(lengths) < 700


def test_a_tenth_of_the_rows_is_in_another_script_and_short(rows):
    foreign = []
    for row in rows:
        letters = [character for character in body(row) if character.isalpha()]
        if sum(map(is_latin, letters)) < len(letters) / 2:
            foreign.append(row)
    assert len(foreign) >= len(rows) / 10
    assert {"ar", "he", "hi", "ja", "ko", "ru", "th", "zh-CN"} <= {row.language for row in foreign}
    assert max(len(row.prompt) for row in foreign) < 200


def test_some_rows_hold_emoji(rows):
    assert sum(bool(EMOJI.search(row.prompt)) for row in rows) >= 10


def test_parquet_and_jsonl_hold_the_same_rows(rows, written):
    expected = [vars(row) for row in rows]
    assert pq.read_table(written / "prompts.parquet").to_pylist() == expected
    lines = (written / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == expected
    assert sorted(path.name for path in written.iterdir()) == ["prompts.jsonl", "prompts.parquet"]


def test_a_second_write_leaves_the_files_alone_and_repairs_a_spoiled_one(written):
    def state(name):
        status = (written / name).stat()
        return status.st_ino, status.st_mtime_ns

    parquet, content = written / "prompts.parquet", (written / "prompts.jsonl").read_bytes()
    before = state("prompts.parquet")
    (written / "prompts.jsonl").write_bytes(content[: len(content) // 2])
    prompts.write(written)
    assert state(parquet.name) == before
    assert (written / "prompts.jsonl").read_bytes() == content


def test_another_process_writes_the_same_bytes_and_imports_nothing_that_it_reads(written, tmp_path):
    code = (
        "import sys, pathlib; from demo import prompts; prompts.write(pathlib.Path(sys.argv[1]));"
        "print({'airflow', 'fastapi', 'rich'} & set(sys.modules) or 'none')"
    )
    command = [sys.executable, "-c", code, tmp_path / "again"]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    assert subprocess.check_output(command, env=environment, text=True).strip() == "none"
    for name in ("prompts.parquet", "prompts.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (written / name).read_bytes()


def test_an_excerpt_ends_with_a_paragraph_or_a_word():
    text = "one two three\n\nfour five"
    assert excerpt(text, 100) == text
    assert excerpt(text, 16) == "one two three"
    assert excerpt(text, 9) == "one two"
