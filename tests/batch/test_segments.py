"""Segments keep whole records, whatever happens to their bytes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.batch import segments
from tasks.batch.records import Result
from tasks.batch.segments import SegmentWriter

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def result(row_id: str, answer: str | None = "yes") -> Result:
    return Result(
        id=row_id,
        status="answered",
        answer=answer,
        error_class=None,
        error_message=None,
        finish_reason="stop",
        prompt_tokens=3,
        completion_tokens=1,
        latency_s=0.5,
        worker="worker-0",
        attempts=1,
        release_id="release-1",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One for all examples: making a folder takes longer than an example."""
    return tmp_path_factory.mktemp("segments")


def documents(path: Path, start: int = 0, stop: int | None = None) -> list[bytes]:
    return [found.document for found in segments.records(path, start, stop)]


def file_of(folder: Path, content: bytes) -> Path:
    path = folder / "one.seg"
    path.write_bytes(content)
    return path


def test_what_was_flushed_is_read_as_it_was(tmp_path):
    written = [result("a"), result("b", "two\nlines \u2028 日本 🙂 \x00"), result("c", None)]
    with SegmentWriter(tmp_path, "attempt") as writer:
        for one in written:
            writer.append(one)
        writer.flush()
        assert [Result.from_json(document) for document in documents(writer.path)] == written


def test_two_attempts_of_one_name_write_two_files(tmp_path):
    with SegmentWriter(tmp_path, "attempt") as first, SegmentWriter(tmp_path, "attempt") as second:
        assert first.path != second.path


@given(st.lists(texts, max_size=6), st.data())
def test_a_file_cut_at_any_byte_holds_the_whole_records_before(folder, answers, data):
    lines = [segments.line_of(result(str(n), text).to_json()) for n, text in enumerate(answers)]
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    path = file_of(folder, content[:cut])
    whole = sum(1 for n in range(len(lines)) if len(b"".join(lines[: n + 1])) <= cut)
    assert documents(path) == [line[9:-1] for line in lines[:whole]]


@given(st.lists(texts, min_size=1, max_size=6), st.data())
def test_a_changed_byte_costs_the_rows_from_there_and_never_makes_a_wrong_one(folder, answers, data):
    lines = [segments.line_of(result(str(n), text).to_json()) for n, text in enumerate(answers)]
    content = bytearray(b"".join(lines))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path = file_of(folder, bytes(content))
    whole = sum(1 for n in range(len(lines)) if len(b"".join(lines[: n + 1])) <= place)
    assert documents(path) == [line[9:-1] for line in lines[:whole]]


@given(st.lists(texts, min_size=1, max_size=6), st.data())
def test_a_reader_takes_no_more_than_the_registered_bytes(folder, answers, data):
    lines = [segments.line_of(result(str(n), text).to_json()) for n, text in enumerate(answers)]
    path = file_of(folder, b"".join(lines))
    first = data.draw(st.integers(0, len(lines)))
    last = data.draw(st.integers(first, len(lines)))
    start, stop = len(b"".join(lines[:first])), len(b"".join(lines[:last]))
    assert documents(path, start, stop) == [line[9:-1] for line in lines[first:last]]
    torn = data.draw(st.integers(start, stop))
    whole = sum(1 for n in range(first, last) if len(b"".join(lines[: n + 1])) <= torn)
    assert documents(path, start, torn) == [line[9:-1] for line in lines[first : first + whole]]


def test_a_segment_that_is_gone_has_no_records(tmp_path):
    assert documents(tmp_path / "gone.seg") == []
