"""The same with real Spark: its driver, its Python workers, and what is left when they are killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks import settings
from tasks.batch import segments
from tasks.batch.records import Result
from tasks.errors import StageFailed, Unavailable
from tasks.node import processes
from tasks.settings import REPOSITORY
from tests.batch.stand_in import Does, StandIn, answer_to
from tests.batch.world import World, prompt_of, write_input
from tests.runs import wait_until

pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".envs/spark/bin/python").exists(), reason="the Spark environment is not set up"
)

STAGE = "import sys; from tasks.stages import execute; execute(sys.argv[1], sys.argv[2])"


def test_the_whole_batch_by_spark(world: World):
    ids = [f"r{n:03d}" for n in range(200)]

    def refuse(worker: str, prompt: str, before: int) -> Does | None:
        return Does(status=400, body=b"no") if " r007 " in prompt else None

    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", ids))
    with StandIn(world.key, behaviour=refuse) as pool:
        world.run("scheduled__2026-03-09T00:00:00+00:00", spec, pool.registry)
        run_id = "scheduled__2026-03-09T00:00:00+00:00"
        done = {stage: world.execute(stage, run_id) for stage in ("prepare", "run", "reconcile", "publish")}
        assert set(pool.asked.values()) == {1}
        again = {stage: world.execute(stage, run_id) for stage in done}
    out = world.published()
    assert [row["id"] for row in out] == ids
    assert {row["id"] for row in out if row["status"] == "failed"} == {"r007"}
    assert all(row["answer"] == answer_to(prompt_of(row["id"])) for row in out if row["status"] == "answered")
    assert done["run"].facts["answered"] == 199
    assert done["run"].facts["rows_per_s"] > 0
    assert not any(result.changed for result in again.values())
    assert progress(world, run_id) == (200, 200)
    assert not processes.find()
    everything = b"".join(path.read_bytes() for path in world.root.rglob("*") if path.is_file())
    assert everything.count(world.key.encode()) == 0
    assert not list((world.home / "spark").iterdir())


@pytest.mark.everything
def test_sessions_go_on_and_what_kills_engines_is_asked_alone_by_spark(world: World):
    """First turns were answered by an earlier attempt; one row ends every connection that it is asked on."""
    turns = [f"s{session}-t{turn}" for turn in range(3) for session in range(4)]
    path = write_input(
        world.root / "in" / "p.parquet", [*turns, "poison"], who=[*(one[:2] for one in turns), None]
    )
    spec = world.spec(path, batch={"session": "who"})

    def poison(worker: str, prompt: str, before: int) -> Does | None:
        return Does(closes=True) if " poison " in prompt else None

    with StandIn(world.key, behaviour=poison) as pool:
        world.run("one", spec, pool.registry)
        folder = Path(world.execute("prepare", "one").facts["folder"])
        with segments.SegmentWriter(folder / "segments", "earlier") as writer:
            for one in turns[:4]:
                writer.append(
                    Result(
                        one, "answered", f"said to {one}", None, None, "stop", 3, 1, 0.1, "w", 1, "release-1"
                    )
                )
        assert world.execute("prepare", "one").facts["answered"] == 4
        done = {name: world.execute(name, "one") for name in ("run", "reconcile", "publish")}
        bodies = {body["messages"][-1]["content"]: body["messages"] for body in pool.bodies}
        assert pool.asked[prompt_of("poison")] == 4  # twice in company, twice alone
    for session in range(4):
        first, second, third = (f"s{session}-t{turn}" for turn in range(3))
        assert prompt_of(first) not in bodies
        said = [message["content"] for message in bodies[prompt_of(third)]]
        second_answer = answer_to(prompt_of(second))
        assert said == [
            prompt_of(first), f"said to {first}", prompt_of(second), second_answer, prompt_of(third)
        ]  # fmt: skip
    assert done["reconcile"].facts == {"rows": 13, "answered": 12, "failed": 1, "not_started": 0}
    assert [(row["id"], row["error_class"]) for row in world.published() if row["error_class"]] == [
        ("poison", "KillsEngine")
    ]


@pytest.mark.parametrize("victim", ["stage", pytest.param("driver", marks=pytest.mark.everything)])
def test_a_run_that_is_killed_goes_on_and_asks_no_row_twice_beyond_the_bound(world: World, victim: str):
    ids = [f"r{n:04d}" for n in range(1500)]
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", ids))
    with StandIn(world.key, latency_s=0.1, max_num_seqs=8) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        with the_stage_run(world) as stage:
            wait_until(lambda: sum(pool.answered.values()) > 300, deadline_s=600)
            assert_workers_have_no_secret_and_no_ledger(world)
            before = sum(pool.answered.values())
            if victim == "stage":
                stage.kill()
            else:
                os.kill(driver().pid, signal.SIGKILL)
            stage.wait(60)
            # Nobody ends them: the kernel and Spark do.
            wait_until(lambda: not processes.find(), deadline_s=30)
        assert before < 1400
        done = {name: world.execute(name, "one") for name in ("prepare", "run", "reconcile", "publish")}
        rate = 240  # rows/s: 24 in flight, 0.1 s each
        asked_twice = sum(count - 1 for count in pool.asked.values())
        assert asked_twice <= pool.most_in_flight + rate * world.settings.segment_flush_s
        assert asked_twice > 0  # else nothing was in flight, and the test shows nothing
    assert done["prepare"].facts["answered"] > 0
    assert done["reconcile"].facts == {"rows": 1500, "answered": 1500, "failed": 0, "not_started": 0}
    assert [row["id"] for row in world.published()] == ids


def test_a_run_whose_pool_ends_meanwhile_ends_with_it(world: World, monkeypatch: pytest.MonkeyPatch):
    """After a host was killed nothing of the pool answers, and a worker might be back within the patience."""
    monkeypatch.setenv("QWEN_PIPELINE_ENGINE_PATIENCE_S", "120")
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", [f"r{n:03d}" for n in range(400)]))
    with ThreadPoolExecutor(1) as threads:
        with StandIn(world.key, latency_s=0.1, max_num_seqs=2) as pool:
            world.run("one", spec, pool.registry)
            world.execute("prepare", "one")
            stage = threads.submit(world.execute, "run", "one")
            wait_until(lambda: sum(pool.answered.values()) > 20, deadline_s=600)
        world.end_pool("one", "reaped: its lease expired")
        with pytest.raises(
            StageFailed, match=r"has ended \(reaped: its lease expired\); what is answered is kept"
        ):
            stage.result(60)
    assert not processes.find()


@pytest.mark.everything
def test_a_python_worker_that_is_killed_is_a_failure_that_a_retry_can_mend(world: World):
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", [f"r{n:03d}" for n in range(400)]))
    with StandIn(world.key, latency_s=0.1, max_num_seqs=2) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        with ThreadPoolExecutor(1) as threads:
            stage = threads.submit(world.execute, "run", "one")
            wait_until(lambda: sum(pool.answered.values()) > 20, deadline_s=600)
            for process in processes.find():
                if b"pyspark.daemon" in command(process):
                    os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(Unavailable, match="a process of Spark's was killed or lost"):
                stage.result(120)
        assert world.execute("run", "one").facts["answered"] == 400


def test_why_a_run_failed_is_told_and_what_is_answered_is_kept(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QWEN_PIPELINE_ENGINE_PATIENCE_S", "1")
    settings.current.cache_clear()
    spec = world.spec(write_input(world.root / "in" / "prompts.parquet", [f"r{n}" for n in range(40)]))

    def some(worker: str, prompt: str, before: int) -> Does | None:
        if sum(pool.answered.values()) >= 20:
            pool.hidden = {"worker-0", "worker-1"}
            return Does(closes=True)
        return None

    with StandIn(world.key, max_num_seqs=2, behaviour=some) as pool:
        world.run("one", spec, pool.registry)
        world.execute("prepare", "one")
        with pytest.raises(Unavailable, match="no worker was ready for 1 s"):
            world.execute("run", "one")
        kept = world.execute("prepare", "one").facts["answered"]
    assert kept == len(list(segment_rows(world))) >= 20


@contextmanager
def the_stage_run(world: World) -> Iterator[subprocess.Popen[bytes]]:
    """The stage in a process of its own, as a task of Airflow is."""
    stage = subprocess.Popen(
        [sys.executable, "-c", STAGE, "run", "one"], env={**os.environ, **world.environment}
    )
    try:
        yield stage
    finally:
        stage.kill()
        stage.wait()


def segment_rows(world: World) -> list[bytes]:
    return [
        found.document
        for path in world.output.rglob(f"*{segments.SUFFIX}")
        for found in segments.records(path)
    ]


def driver() -> processes.Process:
    """The Python driver of the application."""
    (found,) = [
        process
        for process in processes.find()
        if b"tasks/batch/spark_entry/entry.py" in command(process)
        and b"java" not in command(process).split(b"\0")[0]
    ]
    return found


def command(process: processes.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return b""


def assert_workers_have_no_secret_and_no_ledger(world: World) -> None:
    password = (world.home / "ledger-url").read_text().split(":")[2].split("@")[0].encode()
    secret = (world.home / "secret").read_bytes()
    seen = 0
    for process in processes.find():
        try:
            shown = command(process) + Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        seen += b"pyspark" in shown
        for word in (password, secret, world.key.encode()):
            assert word not in shown, f"a secret is in argv or environment of {command(process)!r}"
    assert seen


def progress(world: World, run_id: str) -> tuple[int, int]:
    with world.ledger() as ledger, ledger.transaction() as connection:
        (row,) = [
            row for row in ledger.queries.stages_of_run(connection, run_id=run_id) if row["stage"] == "run"
        ]
        found = connection.execute("select done, total from progress where run_id = %s", [run_id]).fetchone()
    assert row["outcome"] == "nothing to do"
    assert found is not None
    return found["done"], found["total"]
