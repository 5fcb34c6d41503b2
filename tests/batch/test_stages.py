"""prepare, run, reconcile and publish of one batch; the run is answered without Spark here.

Spark itself is in test_spark.py: it takes many seconds a time.
"""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from tasks.batch import answering, driver, in_ledger, prepared, rows, segments
from tasks.errors import Busy, Fenced, InputError, StageFailed
from tasks.ledger import Claim, load
from tasks.ledger.claims import take
from tasks.spark import SparkSubmission
from tasks.stages import execute
from tests.batch.stand_in import Does, StandIn, answer_to
from tests.batch.without_spark import answer_without_spark, rows_of
from tests.batch.world import World, prompt_of, write_input

IDS = [f"r{n:03d}" for n in range(60)]


@pytest.fixture
def submissions(world: World) -> list[SparkSubmission]:
    """Everything that was submitted instead of to Spark."""
    return []


@pytest.fixture
def run_stage(world: World, submissions: list[SparkSubmission]) -> Callable[[str], Any]:
    """Executes the stage `run` with the application in this process: the driver's work without Spark's."""

    def submit(submission: SparkSubmission) -> None:
        submissions.append(submission)
        _, run_id, _, epoch = submission.arguments
        with world.ledger() as ledger:
            answer_without_spark(Claim(ledger, run_id, "run", int(epoch)), world.settings)

    return lambda run_id: execute("run", run_id, settings=world.settings, submit=submit)


def work(world: World, run_stage: Callable[[str], Any], run_id: str) -> dict[str, Any]:
    """All stages of the batch; returns what each one did."""
    return {
        stage: (run_stage(run_id) if stage == "run" else world.execute(stage, run_id))
        for stage in ("prepare", "run", "reconcile", "publish")
    }


def test_every_row_in_is_a_row_out_in_the_inputs_order(world, run_stage):
    def refuse(worker: str, prompt: str, before: int) -> Does | None:
        return Does(status=400, body=b"no such role") if " r007 " in prompt else None

    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", IDS))
    with StandIn(world.key, behaviour=refuse) as pool:
        world.run("one", spec, pool.registry)
        done = work(world, run_stage, "one")
    out = world.published()
    assert [row["id"] for row in out] == IDS
    answers = {row["id"]: row for row in out}
    assert answers["r008"]["answer"] == answer_to(prompt_of("r008"))
    assert (answers["r008"]["status"], answers["r008"]["release_id"]) == ("answered", "release-1")
    assert answers["r007"]["answer"] is None
    assert (answers["r007"]["status"], answers["r007"]["error_class"]) == ("failed", "BadRequest")
    assert done["prepare"].facts["to_do"] == 60
    assert done["run"].facts["answered"] == 59
    assert done["reconcile"].facts == {"rows": 60, "answered": 59, "failed": 1, "not_started": 0}
    assert done["publish"].facts["failed"] == 1


def test_answers_are_published_in_other_formats_too_where_the_spec_asks(world, run_stage):
    spec = world.spec(
        write_input(world.root / "in" / "prompts.parquet", IDS[:4]), batch={"also": ["jsonl", "openai_batch"]}
    )
    with StandIn(world.key, behaviour=lambda w, p, b: Does(status=400) if " r002 " in p else None) as pool:
        world.run("one", spec, pool.registry)
        work(world, run_stage, "one")
    folder = world.output / world.manifest()["version"]
    as_lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert as_lines == world.published()
    responses = [json.loads(line) for line in (folder / "openai-batch.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in responses] == IDS[:4]
    assert [one["error"] is None for one in responses] == [True, True, False, True]


def test_failed_rows_can_be_fed_in_again(world, run_stage):
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", IDS[:4]))
    with StandIn(world.key, behaviour=lambda w, p, b: Does(status=400) if " r002 " in p else None) as pool:
        world.run("one", spec, pool.registry)
        work(world, run_stage, "one")
    again = world.output / world.manifest()["version"] / "failed.jsonl"
    assert [json.loads(line)["row_id"] for line in again.read_text().splitlines()] == ["r002"]
    second = world.spec(again, batch={"output": str(world.root / "again")})
    with StandIn(world.key) as pool:
        world.run("two", second, pool.registry)
        assert work(world, run_stage, "two")["publish"].facts["answered"] == 1
        assert pool.asked == {prompt_of("r002"): 1}


def test_the_second_time_there_is_nothing_to_do_and_no_file_changes(world, run_stage, submissions):
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", IDS))
    with StandIn(world.key) as pool:
        world.run("one", spec, pool.registry)
        work(world, run_stage, "one")
        before = snapshot(world.output)
        # Another run of the same batch: the rows are its answers too, and it needs no pool.
        world.run("two", spec)
        for run_id in ("one", "two"):
            done = work(world, run_stage, run_id)
            changed = {stage for stage, result in done.items() if result.changed}
            assert changed == set()
            assert done["prepare"].facts["to_do"] == 0
            assert "nothing to do" in done["run"].message
        assert snapshot(world.output) == before
        assert len(submissions) == 1
        assert sum(pool.asked.values()) == 60


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("harm", ["deleted", "changed"])
@pytest.mark.parametrize("which", ["part-00000.parquet", "failed.jsonl"])
def test_a_published_file_that_was_harmed_is_written_again_without_a_model(world, run_stage, harm, which):
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", IDS))
    with StandIn(world.key) as pool:
        world.run("one", spec, pool.registry)
        work(world, run_stage, "one")
        asked = sum(pool.asked.values())
    before, rows_before = snapshot(world.output), world.published()
    path = world.output / world.manifest()["version"] / which
    if harm == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b" ")
    done = work(world, run_stage, "one")
    assert done["publish"].changed
    assert not done["run"].changed
    assert world.published() == rows_before
    after = snapshot(world.output)
    touched = {name for name in after if after[name] != before.get(name)}
    assert touched == {str(path)}
    assert asked == 60


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


def test_integer_ids_become_texts_and_clash_with_texts_that_read_alike(world):
    write_input(world.root / "in" / "a.parquet", [1, 2])
    world.run("one", world.spec(world.root / "in"))
    assert world.execute("prepare", "one").facts["rows"] == 2
    write_input(world.root / "in" / "b.parquet", ["2", "3"])
    world.run("two", world.spec(world.root / "in"))
    with pytest.raises(InputError, match=r"'2' \(2 rows\)"):
        world.execute("prepare", "two")


def test_too_many_failed_rows_publish_nothing_and_say_why(world, run_stage):
    spec = world.spec(
        write_input(world.root / "in" / "p.parquet", IDS[:10]), limits={"max_row_error_rate": 0.2}
    )
    with StandIn(
        world.key, behaviour=lambda w, p, b: Does(status=400, body=b"why") if int(p[11:13]) < 3 else None
    ) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        run_stage("one")
    for stage in ("reconcile", "publish"):
        with pytest.raises(StageFailed, match=r"3 of 10 rows failed, .* 3 x BadRequest \(row r000: why\)"):
            world.execute(stage, "one")
    assert not (world.output / "manifest.json").exists()


def test_rows_not_started_are_published_only_where_the_spec_allows_and_as_a_version(world, run_stage):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS), limits={"max_tokens": 200})
    with StandIn(world.key, workers=1, max_num_seqs=1, latency_s=0.3) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        done = run_stage("one")
        assert 0 < done.facts["answered"] < 60
        assert "token limit" in done.message
        with pytest.raises(StageFailed, match=r"rows are not started, and limits\.partial is false"):
            world.execute("reconcile", "one")
        assert not run_stage("one").changed
        partial = world.spec(world.root / "in" / "p.parquet", limits={"max_tokens": 200, "partial": True})
        world.run("partial", partial, pool.registry)
        work(world, run_stage, "partial")
        first = world.manifest()
        assert first["partial"]
        assert first["rows"] == 60 > first["answered"] == len(world.published())
        world.run("rest", world.spec(world.root / "in" / "p.parquet"), pool.registry)
        work(world, run_stage, "rest")
        last = world.manifest()
        assert not last["partial"]
        assert last["version"] != first["version"]
        assert {path.name for path in world.output.glob("v-*")} == {first["version"], last["version"]}
        assert set(pool.asked.values()) == {1}


def test_a_run_past_its_deadline_starts_no_row(world, run_stage, submissions):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS), limits={"deadline": "1s"})
    with StandIn(world.key) as pool:
        run = world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        while (datetime.now(UTC) - run.started_at).total_seconds() < 1.0:
            pass
        done = run_stage("one")
    assert not done.changed
    assert "its deadline" in done.message
    assert done.facts["not_started"] == 60
    assert not submissions
    assert not pool.asked


def test_what_a_killed_attempt_left_is_registered_and_not_asked_again(world, run_stage):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS))
    with StandIn(world.key) as pool:
        world.run("killed", spec, pool.registry)
        world.execute("prepare", "killed")
        # The attempt wrote 20 rows and half a line, and was killed before anything was registered.
        with world.ledger() as ledger:
            claim, _ = take(ledger, "killed", "run", frozenset({"run"}))
            run = load(ledger, "killed")
            folder = Path(driver._facts(ledger, run, "prepare")["folder"])
            attempt = segments.attempt_prefix("killed", claim.epoch)
            job = driver.job_of(
                run,
                ledger,
                prepared.load(folder),
                rows.NOTHING,
                attempt=attempt,
                stop_file=folder / "stop",
                settings=world.settings,
                shares=1,
            )
            chunk = rows_of(rows.prepared_rows(prepared.load(folder), prepared.SCHEMA.names))
            answering.answer(job, iter([chunk[:20]]), "p0")
            (torn,) = (folder / "segments").iterdir()
            torn.write_bytes(torn.read_bytes()[:-7])
            claim.finish("failed", "killed by the test", {})
        prepare = world.execute("prepare", "killed")
        assert prepare.changed
        assert prepare.facts["answered"] == 19
        done = work(world, run_stage, "killed")
        assert done["publish"].facts["answered"] == 60
        assert [row["id"] for row in world.published()] == IDS
        assert sum(count - 1 for count in pool.asked.values()) == 1


def test_of_two_answers_the_first_committed_one_counts(world):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS[:2]))
    run = world.run("one", spec)
    folder = Path(world.execute("prepare", "one").facts["folder"])
    with world.ledger() as ledger:
        for name, answer in (("z", "first"), ("a", "second")):
            claim, _ = take(ledger, "one", "run", frozenset({"run"}))
            assert in_ledger.become_writer(claim, folder.name) is None
            with segments.SegmentWriter(folder / "segments", name) as writer:
                for row_id in IDS[:2]:
                    writer.append(a_result(row_id, answer))
            rows.adopt(claim, prepared.load(folder))
        claim.finish("done", "", {})
        answers = rows.answers_of(ledger, folder.name, world.output)
        assert answers.records == 4
        assert rows.survey(prepared.load(folder), answers, run.spec).answered == 2
    world.execute("publish", "one")
    assert {row["answer"] for row in world.published()} == {"first"}


def a_result(row_id: str, answer: str) -> Any:
    from tasks.batch.records import Result

    return Result(row_id, "answered", answer, None, None, "stop", 3, 1, 0.1, "worker-0", 1, "release-1")


def test_only_the_batchs_writer_registers_segments_whatever_the_code_does(world):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS[:2]))
    for run_id in ("one", "two"):
        world.run(run_id, spec)
    batch_id = Path(world.execute("prepare", "one").facts["folder"]).name
    one = in_ledger.Range(world.output / "x.seg", 0, 10, 1)
    with world.ledger() as ledger:
        writer, _ = take(ledger, "one", "run", frozenset({"run"}))
        other, _ = take(ledger, "two", "run", frozenset({"run"}))
        assert in_ledger.become_writer(writer, batch_id) is None
        # Its claim is live, and it goes past the question who writes.
        with pytest.raises(Fenced, match=r"epoch .* of run two is not the writer of batch"):
            in_ledger.register(other, batch_id, [one])
        in_ledger.register(writer, batch_id, [one])
        with writer.writing() as connection, pytest.raises(psycopg.Error, match="registered by another"):
            connection.execute("update segment set run_id = 'two', epoch = %s, stop_byte = 20", [other.epoch])
        assert [found.stop for found in in_ledger.registered(ledger, batch_id)] == [10]


def test_an_id_that_is_not_in_the_input_stops_publishing(world):
    world.run("one", world.spec(write_input(world.root / "in" / "p.parquet", IDS[:1])))
    folder = Path(world.execute("prepare", "one").facts["folder"])
    with world.ledger() as ledger:
        claim, _ = take(ledger, "one", "run", frozenset({"run"}))
        assert in_ledger.become_writer(claim, folder.name) is None
        with segments.SegmentWriter(folder / "segments", "x") as writer:
            for row_id in (IDS[0], "stranger"):
                writer.append(a_result(row_id, "a"))
        rows.adopt(claim, prepared.load(folder))
        claim.finish("done", "", {})
    with pytest.raises(StageFailed, match="1 finished ids that are not in the input"):
        world.execute("reconcile", "one")


def test_another_run_of_the_batch_waits_and_then_says_busy(world, run_stage, monkeypatch):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS))
    with StandIn(world.key) as pool:
        for run_id in ("one", "two"):
            world.run(run_id, spec, pool.registry)
            world.execute("prepare", run_id)
        with world.ledger() as ledger:
            claim, _ = take(ledger, "one", "run", frozenset({"run"}))
            in_ledger.become_writer(
                claim, Path(driver._facts(ledger, load(ledger, "one"), "prepare")["folder"]).name
            )
            monkeypatch.setenv("QWEN_PIPELINE_BATCH_WAIT_S", "0.1")
            with pytest.raises(Busy, match=rf"run one is at work on the same batch .* pid {os.getpid()}"):
                run_stage("two")
            assert not pool.asked
            claim.finish("done", "", {})
        assert run_stage("two").facts["answered"] == 60


def test_a_ledger_that_lost_its_rows_learns_them_from_the_segments(world, run_stage):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS))
    with StandIn(world.key) as pool:
        world.run("one", spec, pool.registry)
        work(world, run_stage, "one")
        with world.ledger() as ledger:
            claim, _ = take(ledger, "one", "run", frozenset({"run"}))
            batch_id = driver._facts(ledger, load(ledger, "one"), "prepare")["batch_id"]
            in_ledger.forget_segments(claim, batch_id)
            claim.finish("done", "", {})
        (world.output / "manifest.json").unlink()
        done = work(world, run_stage, "one")
        assert done["publish"].facts["answered"] == 60
        assert sum(pool.asked.values()) == 60


def test_no_row_is_started_once_the_tenants_tokens_of_the_day_are_spent_by_whichever_run(
    world, run_stage, monkeypatch
):
    monkeypatch.setenv("QWEN_PIPELINE_QUOTAS", '{"prod": {"tokens_per_day": 200}}')
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS), tenant="prod")
    with StandIn(world.key, workers=1, max_num_seqs=1, latency_s=0.3) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        first = run_stage("one")
        assert 0 < first.facts["answered"] < 60
        spent = first.facts["prompt_tokens"] + first.facts["completion_tokens"]
        assert spent >= 200
        assert "because the run reached the quota of tenant prod (200 tokens in 24 hours" in first.message
        world.run("two", spec, pool.registry)
        world.execute("prepare", "two")
        assert not run_stage("two").changed
    with world.ledger() as ledger, ledger.transaction() as connection:
        assert ledger.queries.tokens_of_tenant(connection, tenant="prod") == spent


def test_segments_go_after_their_retention_and_the_published_rows_still_count(world, run_stage, monkeypatch):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS[:5]))
    other = world.spec(
        write_input(world.root / "in2" / "p.parquet", IDS[5:8]), batch={"output": str(world.root / "other")}
    )
    with StandIn(world.key) as pool:
        world.run("one", spec, pool.registry)
        folder = Path(work(world, run_stage, "one")["prepare"].facts["folder"])
        assert list((folder / "segments").iterdir())
        monkeypatch.setenv("QWEN_PIPELINE_SEGMENT_RETENTION_H", "0")
        world.run("two", other, pool.registry)
        work(world, run_stage, "two")
        assert not list((folder / "segments").iterdir())
        done = work(world, run_stage, "one")
        assert done["prepare"].facts["answered"] == 5
        assert not done["publish"].changed
        # A new version is made from the old one's rows.
        harmed = world.output / world.manifest()["version"] / "failed.jsonl"
        harmed.write_text("changed")
        assert work(world, run_stage, "one")["publish"].facts["answered"] == 5
        assert set(pool.asked.values()) == {1}


def test_a_run_without_a_pool_says_what_to_do(world, run_stage):
    world.run("one", world.spec(write_input(world.root / "in" / "p.parquet", IDS)))
    world.execute("prepare", "one")
    with pytest.raises(StageFailed, match="no pool of workers runs: run the stage start"):
        run_stage("one")


def test_a_submission_shows_no_secret(world, run_stage, submissions):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS[:2]))
    with StandIn(world.key) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        run_stage("one")
    shown = repr(submissions)
    password = (world.home / "ledger-url").read_text().split(":")[2].split("@")[0]
    assert world.key not in shown
    assert (world.home / "secret").read_text() not in shown
    assert password not in shown
