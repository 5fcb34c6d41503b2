"""What is asked, and what the batch is: its rows, their ids, its identity."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.batch import ids, prepared, prepared_part, rows
from tasks.errors import InputError, StageFailed, Unavailable
from tests.batch.stages.working import IDS, work
from tests.batch.stand_in import StandIn
from tests.batch.world import write_input


def test_a_prepared_file_that_was_deleted_is_written_again(world, run_stage):
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", IDS))
    world.run("one", spec)
    first = world.execute("prepare", "one")
    folder = Path(first.facts["folder"]) / "prepared"
    (folder / "part-00000.parquet").unlink()
    again = world.execute("prepare", "one")
    assert again.changed
    assert again.facts == first.facts
    assert sorted(path.name for path in folder.parent.iterdir()) == ["prepared"]
    assert not world.execute("prepare", "one").changed


def test_the_batch_is_the_input_not_its_place_or_the_limits(world):
    place = write_input(world.root / "in" / "prompts.parquet", IDS)
    moved = write_input(world.root / "elsewhere" / "other.parquet", IDS)
    other = write_input(world.root / "other" / "prompts.parquet", [*IDS[:-1], "another"])
    specs = {
        "one": world.spec(place),
        "moved": world.spec(moved, limits={"deadline": "1h"}, layout={"cpu": 2}),
        "other": world.spec(other),
        "hotter": world.spec(place, batch={"sampling": {"max_tokens": 16, "temperature": 0.5}}),
    }
    ids = {}
    for name, spec in specs.items():
        world.run(name, spec)
        ids[name] = world.execute("prepare", name).facts["batch_id"]
    assert ids["one"] == ids["moved"]
    assert len({ids["one"], ids["other"], ids["hotter"]}) == 3


@pytest.mark.parametrize(
    ("batch", "serving", "is_another"),
    [
        ({}, {"max_model_len": 1024}, False),
        ({}, {"max_num_seqs": 3}, False),
        ({}, {"extra_args": {"reasoning-parser": "qwen3"}}, True),
        ({"too_long": "truncate"}, {"max_model_len": 1024}, True),
        ({"session": "who"}, {"max_model_len": 1024}, True),
    ],
    ids=["longer", "more-at-once", "extra-args", "longer-truncated", "longer-sessions"],
)
def test_how_workers_serve_makes_another_batch_where_answers_depend_on_it(world, batch, serving, is_another):
    place = write_input(world.root / "in" / "prompts.parquet", IDS, who=["s"] * len(IDS))
    world.run("one", world.spec(place, batch=batch))
    world.run("other", world.spec(place, batch=batch, serving=serving))
    one, other = (world.execute("prepare", name).facts["batch_id"] for name in ("one", "other"))
    assert (one != other) is is_another


def test_an_answer_of_any_length_is_too_long_beside_its_prompt(world):
    tokens = pa.array([4, 2**31 - 1], pa.int32())
    table = pa.table({"prompt_tokens": tokens, "max_tokens": tokens, "error_class": pa.nulls(2, pa.string())})
    assert rows.never_sent(table, world.spec(world.root)).to_pylist() == [False, True]


def test_rows_too_long_are_failed_without_being_asked_and_to_do_under_a_longer_context(world, run_stage):
    place = write_input(world.root / "in" / "prompts.parquet", IDS[:3])
    table = pq.read_table(place).to_pylist()
    table[1]["prompt"] = "word " * 300
    place.unlink()
    lines = world.root / "in" / "prompts.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in table))
    with StandIn(world.key) as pool:
        world.run("short", world.spec(lines), pool.registry)
        done = work(world, run_stage, "short")
        assert done["prepare"].facts["to_do"] == 2
        assert done["prepare"].facts["longest_prompt_tokens"] == 303
        assert [row["error_class"] for row in world.published()] == [None, "PromptTooLong", None]
        world.run("long", world.spec(lines, serving={"max_model_len": 1024}), pool.registry)
        done = work(world, run_stage, "long")
        assert done["prepare"].facts["to_do"] == 1
        assert done["publish"].facts == {**done["publish"].facts, "answered": 3, "failed": 0}
        assert set(pool.asked.values()) == {1}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "b", "a", "c", "c", "c"], r"batch\.id: 2 ids .* 'a' \(2 rows\), 'c' \(3 rows\)"),
        (
            ["a", None, ""],
            r"batch\.id: 2 rows have no id .* prompts\.parquet, row 2; prompts\.parquet, row 3",
        ),
        ([], r"batch\.input: .* holds no rows"),
    ],
)
def test_ids_that_cannot_name_rows_are_refused_with_examples(world, ids, message):
    world.run("one", world.spec(write_input(world.root / "in" / "prompts.parquet", ids)))
    with pytest.raises(InputError, match=message):
        world.execute("prepare", "one")


def test_input_that_is_refused_leaves_no_copy(world):
    path = write_input(world.root / "in" / "prompts.parquet", ["a", "a"])
    world.run("one", world.spec(path))
    with pytest.raises(InputError):
        world.execute("prepare", "one")
    assert not list((world.output / "_batch").iterdir())


def test_a_full_disk_leaves_no_half_copy_and_what_was_there_before(world, monkeypatch):
    world.run("one", world.spec(write_input(world.root / "in" / "prompts.parquet", IDS)))
    folder = Path(world.execute("prepare", "one").facts["folder"])
    (folder / "prepared" / "part-00000.parquet").unlink()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ids, "prove", full)
        with pytest.raises(StageFailed, match="disk is full"):
            world.execute("prepare", "one")
    assert [path.name for path in folder.iterdir()] == ["prepared"]


def test_integer_ids_become_texts_and_clash_with_texts_that_read_alike(world):
    write_input(world.root / "in" / "a.parquet", [1, 2])
    world.run("one", world.spec(world.root / "in"))
    assert world.execute("prepare", "one").facts["rows"] == 2
    write_input(world.root / "in" / "b.parquet", ["2", "3"])
    world.run("two", world.spec(world.root / "in"))
    with pytest.raises(InputError, match=r"'2' \(2 rows\)"):
        world.execute("prepare", "two")


@pytest.mark.parametrize(
    ("module", "step", "new_ids"),
    [
        (prepared_part, "write", [*IDS[:-1], "another"]),
        (prepared_part, "write", [*IDS[:-1], IDS[0]]),
        (prepared_part, "write", None),
        (ids, "prove", [*IDS[:-1], "another"]),
    ],
    ids=["before-it-is-read", "by-one-that-is-refused", "by-half-a-file", "after-it-was-read"],
)
def test_input_that_is_replaced_while_it_is_read_is_not_kept_under_the_old_identity(
    world, monkeypatch, module, step, new_ids
):
    path = write_input(world.root / "in" / "prompts.parquet", IDS)
    world.run("one", world.spec(path))
    work = getattr(module, step)

    def replace_first(*arguments):
        if new_ids is None:
            path.write_bytes(path.read_bytes()[:-20])
        else:
            write_input(path, new_ids)
        return work(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, step, replace_first)
        with pytest.raises(Unavailable, match=r"prompts\.parquet changed while it was read"):
            world.execute("prepare", "one")
    assert not list((world.output / "_batch").iterdir())
    write_input(path, IDS)
    folder = Path(world.execute("prepare", "one").facts["folder"])
    rows = [row for part in prepared.load(folder).parts for row in pq.read_table(part).to_pylist()]
    assert [row["id"] for row in rows] == IDS


def test_input_that_is_replaced_after_it_was_read_is_read_by_the_next_try(world, monkeypatch):
    path = write_input(world.root / "in" / "prompts.parquet", IDS)
    world.run("one", world.spec(path))
    publish = prepared.publish

    def then_replace(*arguments):
        found = publish(*arguments)
        write_input(path, IDS[:3])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(prepared, "publish", then_replace)
        with pytest.raises(Unavailable, match="it was replaced"):
            world.execute("prepare", "one")
    assert world.execute("prepare", "one").facts["rows"] == 3
