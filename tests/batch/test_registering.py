"""What the segments grew by is registered once, whoever asks for it."""

from pathlib import Path

from tasks.batch import in_ledger, prepared, segments
from tasks.batch.records import Result
from tasks.batch.registering import Registrar
from tasks.ledger import take
from tests.batch.world import World, write_input

ROWS = 300


def answered(row_id: str) -> Result:
    return Result(row_id, "answered", "yes", None, None, "stop", 3, 1, 0.1, "worker-0", 1, "release-1")


def test_the_driver_may_register_while_the_registrars_own_thread_is_at_it(world: World):
    ids = [f"r{n:03d}" for n in range(ROWS)]
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
        with registrar, segments.SegmentWriter(batch.segments, attempt) as writer:
            for row_id in ids:
                writer.append(answered(row_id))
                writer.flush()
                registrar.register()
        counted = in_ledger.registered(ledger, batch.batch_id)
    assert sum(one.rows for one in counted) == ROWS
    assert (folder / "stop").exists()
