"""What the segments grew by is registered once, whoever asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tasks.batch import in_ledger, prepared, segments
from tasks.batch.prepared import PreparedBatch
from tasks.batch.records import Result
from tasks.batch.registering import Registrar
from tasks.errors import Unavailable
from tasks.ledger import Ledger, take
from tests.batch.world import World, write_input
from tests.runs import wait_until

ROWS = 300


def answered(row_id: str) -> Result:
    return Result(row_id, "answered", "yes", None, None, "stop", 3, 1, 0.1, "worker-0", 1, "release-1")


@dataclass
class Started:
    """A run whose driver is about to begin."""

    ledger: Ledger
    batch: PreparedBatch
    attempt: str
    registrar: Registrar
    stop_file: Path


@contextmanager
def started(world: World, ids: list[str]) -> Iterator[Started]:
    world.run("one", world.spec(write_input(world.root / "in" / "prompts.parquet", ids)))
    folder = Path(world.execute("prepare", "one").facts["folder"])
    batch = prepared.load(folder)
    with world.ledger() as ledger:
        claim, _ = take(ledger, "one", "run", frozenset({"run"}))
        in_ledger.become_writer(claim, batch.batch_id)
        attempt = segments.attempt_prefix("one", claim.epoch)
        registrar = Registrar(
            claim,
            batch,
            attempt,
            finished=0,
            failed=0,
            every_s=0.0,
            tokens_left=4 * ROWS,
            stop_file=folder / "stop",
        )
        yield Started(ledger, batch, attempt, registrar, folder / "stop")


def test_the_driver_may_register_while_the_registrars_own_thread_is_at_it(world: World):
    ids = [f"r{n:03d}" for n in range(ROWS)]
    with started(world, ids) as run:
        with run.registrar, segments.SegmentWriter(run.batch.segments, run.attempt) as writer:
            for row_id in ids:
                writer.append(answered(row_id))
                writer.flush()
                run.registrar.register()
        counted = in_ledger.registered(run.ledger, run.batch.batch_id)
        assert run.stop_file.exists()
    assert sum(one.rows for one in counted) == ROWS


def test_an_error_of_the_database_does_not_end_the_registrars_own_thread(world: World, monkeypatch):
    troubles = iter([psycopg.errors.ReadOnlySqlTransaction("read only"), Unavailable("a lock")])
    register = in_ledger.register

    def refuse_or_register(*arguments):
        for trouble in troubles:
            raise trouble
        register(*arguments)

    monkeypatch.setattr(in_ledger, "register", refuse_or_register)
    with started(world, ["r1"]) as run:
        with segments.SegmentWriter(run.batch.segments, run.attempt) as writer:
            writer.append(answered("r1"))
        with run.registrar:
            wait_until(lambda: in_ledger.registered(run.ledger, run.batch.batch_id))
