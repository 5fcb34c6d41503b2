"""The input is found, checked by its schema alone, and streamed in a fixed order."""

import json
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.batch import input, parts
from tasks.batch.input import InputDescription, InputFile
from tasks.errors import InputError
from tasks.spec import Batch


def batch(place, **changes):
    return Batch.model_validate(
        {"input": str(place), "output": "/o", "id": "id", "prompt": "text", **changes}
    )


def jsonl(path, *documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def all_rows(one):
    cut = parts.cut(input.check(one), 2)
    return [(row.id, row.text) for part in cut for row in parts.read(one, part)]


def test_a_folder_is_read_file_by_file_in_the_order_of_names(tmp_path):
    jsonl(tmp_path / "b.jsonl", {"id": 3, "text": "c"})
    parquet(tmp_path / "a.parquet", id=["1", "2"], text=["a", "b"])
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "notes.txt").write_text("not an input")
    assert all_rows(batch(tmp_path)) == [("1", "a"), ("2", "b"), (3, "c")]


def test_a_glob_and_a_single_file_are_inputs_too(tmp_path):
    one = jsonl(tmp_path / "one.jsonl", {"id": 1, "text": "a"})
    jsonl(tmp_path / "two.jsonl", {"id": 2, "text": "b"})
    assert all_rows(batch(one)) == [(1, "a")]
    assert all_rows(batch(tmp_path / "t*.jsonl")) == [(2, "b")]


def test_other_columns_are_not_read(tmp_path):
    path = parquet(tmp_path / "a.parquet", id=[1], text=["a"], image=[b"..."])
    assert input.check(batch(path)).columns == ("id", "text", "image")
    assert all_rows(batch(path)) == [(1, "a")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "key"}, r"batch\.id: there is no column 'key' in .*; its columns are id, text"),
        (
            {"prompt": "question"},
            r"batch\.prompt: there is no column 'question' in .*; its columns are id, text",
        ),
        ({"prompt": None, "messages": "chat"}, r"batch\.messages: there is no column 'chat'"),
    ],
)
@pytest.mark.parametrize("write", [parquet, jsonl])
def test_a_missing_column_is_named_with_those_that_exist(tmp_path, changes, message, write):
    if write is parquet:
        path = parquet(tmp_path / "a.parquet", id=[1], text=["a"])
    else:
        path = jsonl(tmp_path / "a.jsonl", {"id": 1, "text": "a"})
    with pytest.raises(InputError, match=message):
        input.check(batch(path, **changes))


def test_a_column_that_only_some_files_have_is_missing(tmp_path):
    parquet(tmp_path / "a.parquet", id=[1], text=["a"])
    parquet(tmp_path / "b.parquet", id=[1], prompt=["a"])
    with pytest.raises(InputError, match=r"batch\.prompt: .* its columns are id"):
        input.check(batch(tmp_path))


@pytest.mark.parametrize("place", ["gone", "gone/*.jsonl", "empty"])
def test_an_input_without_files_is_refused(tmp_path, place):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"batch\.input: "):
        input.check(batch(tmp_path / place))


def test_files_that_are_not_what_their_names_say_are_refused(tmp_path):
    bad = tmp_path / "a.parquet"
    bad.write_text("no parquet")
    with pytest.raises(InputError, match=r"batch\.input: .*cannot be read as parquet"):
        input.check(batch(bad))
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"id": 1, "text": "a"}\nnonsense\n')
    with pytest.raises(InputError, match=r"batch\.input: line 2 of .* is not JSON"):
        all_rows(batch(lines))
    lines.write_text('{"id": 1, "text": ' + "[" * 100_000 + "\n")
    with pytest.raises(InputError, match=r"batch\.input: line 1 of .* is nested too deeply"):
        all_rows(batch(lines))


def test_an_id_is_a_text_or_an_integer(tmp_path):
    with pytest.raises(InputError, match=r"batch\.id: column 'id' .* double"):
        input.check(batch(parquet(tmp_path / "a.parquet", id=[1.5], text=["a"])))
    with pytest.raises(InputError, match=r"batch\.id: True in a\.jsonl, line 1"):
        all_rows(batch(jsonl(tmp_path / "a.jsonl", {"id": True, "text": "a"})))


COUNTS = st.lists(st.integers(0, 23), min_size=1, max_size=6)


@given(counts=COUNTS, part_rows=st.integers(1, 12), group=st.integers(1, 9), blanks=st.integers(0, 2))
def test_parts_hold_every_row_once_in_the_inputs_order_and_are_not_too_large(
    tmp_path_factory, counts, part_rows, group, blanks
):
    folder = tmp_path_factory.mktemp("in")
    for number, count in enumerate(counts):
        ids = [f"{number}-{row}" for row in range(count)]
        if number % 2:
            lines = [json.dumps({"id": one, "text": "x"}) + "\n" for one in ids]
            (folder / f"{number}.jsonl").write_text(("\n" * blanks).join(["", *lines]))
        else:
            pq.write_table(
                pa.table({"id": pa.array(ids, pa.string()), "text": pa.array(["x"] * count, pa.string())}),
                folder / f"{number}.parquet",
                row_group_size=group,
            )
    expected = [f"{number}-{row}" for number, count in enumerate(counts) for row in range(count)]
    description = InputDescription(
        tuple(InputFile(path, path.suffix[1:]) for path in sorted(folder.iterdir())), ("id", "text")
    )
    cut = parts.cut(description, part_rows)
    rows = [list(parts.read(batch(folder), part)) for part in cut]
    assert [row.id for part in rows for row in part] == expected
    assert all(part.rows <= part_rows for part in cut)
    assert [part.number for part in cut] == list(range(len(cut)))
    # Positions are free for each row, and grow.
    for (one, after), read in zip(pairwise(cut), rows, strict=False):
        assert one.position + len(read) <= after.position


def test_a_row_says_where_it_stands_whatever_part_it_is_in(tmp_path):
    jsonl(tmp_path / "b.jsonl", *({"id": n, "text": "x"} for n in range(5)))
    parquet(tmp_path / "a.parquet", id=["p", "q", "r"], text=["x"] * 3)
    cut = parts.cut(input.check(batch(tmp_path)), 2)
    places = {row.id: row.place for part in cut for row in parts.read(batch(tmp_path), part)}
    assert places["r"] == "a.parquet, row 3"
    assert places[4] == "b.jsonl, line 5"
