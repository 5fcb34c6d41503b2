"""A run of a batch: what it starts, what it finds done, and who may write."""

import os
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from tasks.batch import answering, driver, in_ledger, prepared, rows, segments
from tasks.errors import Busy, Fenced, StageFailed
from tasks.ledger import load
from tasks.ledger.claims import take
from tests.batch.stages.working import IDS, a_result, work
from tests.batch.stand_in import StandIn
from tests.batch.without_spark import rows_of
from tests.batch.world import write_input


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
            folder = prepared.of_run(ledger, "killed").folder
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


def test_another_run_of_the_batch_waits_and_then_says_busy(world, run_stage, monkeypatch):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS))
    with StandIn(world.key) as pool:
        for run_id in ("one", "two"):
            world.run(run_id, spec, pool.registry)
            world.execute("prepare", run_id)
        with world.ledger() as ledger:
            claim, _ = take(ledger, "one", "run", frozenset({"run"}))
            in_ledger.become_writer(claim, prepared.of_run(ledger, "one").folder.name)
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
            batch_id = prepared.of_run(ledger, "one").batch_id
            with claim.writing() as connection:
                connection.execute("delete from segment where batch_id = %s", [batch_id])
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


def test_a_run_without_a_pool_says_what_to_do(world, run_stage):
    world.run("one", world.spec(write_input(world.root / "in" / "p.parquet", IDS)))
    world.execute("prepare", "one")
    with pytest.raises(StageFailed, match="no pool of workers runs: run the stage start"):
        run_stage("one")


def test_a_run_whose_pool_has_ended_says_why_and_does_not_wait_for_it(world, run_stage, submissions):
    spec = world.spec(write_input(world.root / "in" / "p.parquet", IDS))
    with StandIn(world.key) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        world.end_pool("one", "reaped: its lease expired")
        with pytest.raises(
            StageFailed, match=r"has ended \(reaped: its lease expired\).* start the run again"
        ):
            run_stage("one")
    assert not submissions


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
