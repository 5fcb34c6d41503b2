"""Two runs of one batch that publish it to one output at the same time."""

from collections.abc import Callable
from typing import Any

import pytest

from tasks.batch import files, in_ledger, versions
from tasks.errors import Busy
from tasks.ledger import connection
from tasks.ledger.claims import take
from tests.batch.stages.working import IDS, finish_rows
from tests.batch.world import World, write_input


@pytest.fixture
def two_runs(world: World) -> World:
    """`early` may publish what there is, `late` needs all; 3 of 5 rows are answered."""
    path = write_input(world.root / "in" / "p.parquet", IDS[:5])
    world.run("early", world.spec(path, limits={"partial": True}))
    world.run("late", world.spec(path))
    for run_id in ("early", "late"):
        world.execute("prepare", run_id)
    finish_rows(world, "early", IDS[:3])
    return world


def once_it_has_written(monkeypatch: pytest.MonkeyPatch, then: Callable[[], Any]) -> None:
    """Has the first publisher do `then` between writing its files and moving them in."""
    write = versions.write

    def slow(*arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(versions, "write", write)
        manifest = write(*arguments)
        then()
        return manifest

    monkeypatch.setattr(versions, "write", slow)


def test_a_partial_version_is_published_though_rows_are_finished_meanwhile(two_runs, monkeypatch):
    once_it_has_written(monkeypatch, lambda: finish_rows(two_runs, "late", IDS[3:4]))
    done = two_runs.execute("publish", "early")
    assert (done.facts["answered"], two_runs.manifest()["not_started"]) == (3, 2)


def test_a_slow_publisher_leaves_a_version_that_holds_more(two_runs, monkeypatch):
    def overtake() -> None:
        finish_rows(two_runs, "late", IDS[3:5])
        two_runs.execute("publish", "late")

    once_it_has_written(monkeypatch, overtake)
    done = two_runs.execute("publish", "early")
    assert done.facts["answered"] == two_runs.manifest()["answered"] == 5
    assert len(two_runs.published()) == 5
    assert [path.name for path in two_runs.output.glob("v-*")] == [two_runs.manifest()["version"]]
    assert not list(two_runs.output.glob(".draft-*"))
    for run_id in ("early", "late"):
        assert not two_runs.execute("publish", run_id).changed


def test_a_version_that_was_overtaken_by_one_that_nobody_recorded_is_recorded(two_runs, monkeypatch):
    """The other publisher was killed after the manifest was in its place."""

    def overtake() -> None:
        finish_rows(two_runs, "late", IDS[3:5])
        with monkeypatch.context() as patch:
            patch.setattr(in_ledger, "record_publication", interrupt)
            with pytest.raises(KeyboardInterrupt):
                two_runs.execute("publish", "late")

    once_it_has_written(monkeypatch, overtake)
    assert two_runs.execute("publish", "early").facts["answered"] == 5
    assert not two_runs.execute("publish", "early").changed


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_damaged_version_is_replaced_by_what_is_left_of_it(two_runs):
    finish_rows(two_runs, "late", IDS[3:5])
    two_runs.execute("publish", "late")
    with two_runs.ledger() as ledger:
        claim, _ = take(ledger, "late", "run", frozenset({"run"}))
        with claim.writing() as writing:
            writing.execute("delete from segment where rows = 2")
        claim.finish("done", "", {})
    (two_runs.output / two_runs.manifest()["version"] / "part-00000.parquet").unlink()
    assert two_runs.execute("publish", "early").facts["answered"] == 3


def test_nobody_else_publishes_to_an_output_while_its_manifest_is_replaced(two_runs, monkeypatch):
    write, free = files.write_json, {}

    def look(path: Any, document: Any) -> None:
        with two_runs.ledger() as ledger, ledger.transaction() as own:
            for output in (two_runs.output, two_runs.root / "elsewhere"):
                lock = "select pg_try_advisory_xact_lock(hashtextextended('output ' || %s, 0)) as is_free"
                row = own.execute(lock, [str(output)]).fetchone()
                assert row is not None
                free[output.name] = row["is_free"]
        write(path, document)

    monkeypatch.setattr(files, "write_json", look)
    two_runs.execute("publish", "early")
    assert free == {"answers": False, "elsewhere": True}


def test_a_publisher_who_does_not_come_to_an_end_is_said_to_be_in_the_way(two_runs, monkeypatch):
    monkeypatch.setattr(connection, "_OPTIONS", connection._OPTIONS.replace("30s", "100ms"))
    with two_runs.ledger() as ledger:
        claim, _ = take(ledger, "late", "publish", frozenset({"publish"}))
        with (
            in_ledger.publishing(claim, two_runs.output),
            pytest.raises(Busy, match="another run is publishing to"),
        ):
            two_runs.execute("publish", "early")
        claim.finish("done", "", {})
    assert two_runs.execute("publish", "early").facts["answered"] == 3
