"""How long prepared rows and segments are kept: as long as anybody may need what they hold."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tasks import ledger as ledger_package
from tasks.batch import in_ledger, retention
from tasks.ledger.claims import take
from tests.batch.stages.working import IDS, work
from tests.batch.stand_in import Does, StandIn
from tests.batch.world import World, write_input


@pytest.fixture(autouse=True)
def retention_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No time at all, though a deployment may not say so: what is published was published long ago."""
    seconds, past, remove = [0.0], retention.past, retention.remove
    monkeypatch.setattr(retention, "past", lambda ledger, _: past(ledger, seconds[0]))
    monkeypatch.setattr(retention, "remove", lambda claim, batch_id, _: remove(claim, batch_id, seconds[0]))
    return seconds


@pytest.fixture
def five(world: World) -> Path:
    """The input of the batch that goes or is kept."""
    return write_input(world.root / "in" / "p.parquet", IDS[:5])


@pytest.fixture
def published(world: World, run_stage: Callable[[str], Any], five: Path) -> Callable[[StandIn], Path]:
    """Run `one` of that batch, through to its end and closed; returns the folder that it worked with."""

    def publish(pool: StandIn) -> Path:
        world.run("one", world.spec(five), pool.registry)
        folder = Path(work(world, run_stage, "one")["prepare"].facts["folder"])
        close(world, "one")
        return folder

    return publish


@pytest.fixture
def publish_another(world: World, run_stage: Callable[[str], Any]) -> Callable[..., None]:
    """A run of another batch, through to its end; its `publish` removes what is kept no longer."""

    def publish(pool: StandIn, first: int = 5) -> None:
        path = write_input(world.root / "in2" / f"p-{first}.parquet", IDS[first : first + 3])
        run_id = f"another-{first}"
        world.run(run_id, world.spec(path, batch={"output": str(world.root / run_id)}), pool.registry)
        work(world, run_stage, run_id)

    return publish


@pytest.fixture
def on_removal(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Path], bool | None]]:
    """What happens each time before a batch that is out of the way is deleted; False refuses that."""
    happens: list[Callable[[Path], bool | None]] = []
    remove = shutil.rmtree

    def rmtree(path: Path, **options: Any) -> None:
        if path.name.startswith(".removed-") and False in [each(path) for each in happens]:
            return
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    return happens


@pytest.fixture
def two_hours_pass(database_url: str) -> Callable[[], None]:
    """For what the ledger knows of batches and of runs that are closed."""

    def passing() -> None:
        with psycopg.connect(database_url) as connection:
            for column in (
                "publication.published_at",
                "segment.last_registered_at",
                "claim.claimed_at",
                "run.closed_at",
            ):
                table, name = column.split(".")
                # Whatever the ledger demands of who writes.
                connection.execute(f"alter table ledger.{table} disable trigger user")
                connection.execute(f"update ledger.{table} set {name} = {name} - interval '2 hours'")
                connection.execute(f"alter table ledger.{table} enable trigger user")

    return passing


def close(world: World, run_id: str, verdict: str = "done") -> None:
    with world.ledger() as ledger:
        ledger_package.close(ledger, run_id, verdict)


def segments_of(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


def test_a_batch_goes_after_its_retention_and_the_published_rows_still_count(
    world, published, run_stage, publish_another
):
    with StandIn(world.key) as pool:
        folder = published(pool)
        assert segments_of(folder)
        publish_another(pool)
        assert not folder.exists()
        done = work(world, run_stage, "one")
        assert done["prepare"].facts["answered"] == 5
        assert not done["publish"].changed
        # A new version is made from the old one's rows.
        harmed = world.output / world.manifest()["version"] / "failed.jsonl"
        harmed.write_text("changed")
        assert work(world, run_stage, "one")["publish"].facts["answered"] == 5
        assert set(pool.asked.values()) == {1}


def test_a_batch_that_was_prepared_again_goes_again(world, published, publish_another):
    with StandIn(world.key) as pool:
        folder = published(pool)
        publish_another(pool)
        assert world.execute("prepare", "one").changed
        publish_another(pool, 8)
        assert folder.exists(), "the run is open again"
        close(world, "one")
        publish_another(pool, 11)
    assert not list(folder.parent.iterdir())


def test_a_batch_goes_from_each_output_for_which_it_was_prepared(world, published, five, publish_another):
    elsewhere = world.spec(five, batch={"output": str(world.root / "elsewhere")})
    with StandIn(world.key) as pool:
        published(pool)
        world.run("two", elsewhere)
        world.execute("prepare", "two")
        close(world, "two")
        publish_another(pool)
    assert not [*world.output.glob("_batch/*"), *world.root.glob("elsewhere/_batch/*")]


class Killed(BaseException):
    pass


def killed(_: Path) -> bool | None:
    raise Killed


def refused(_: Path) -> bool | None:
    return False


@pytest.mark.parametrize(("what", "told"), [(killed, pytest.raises(Killed)), (refused, nullcontext())])
def test_a_batch_that_is_half_removed_goes_with_the_next(
    world, published, publish_another, on_removal, what, told
):
    """Of a killed run, and of one that may not delete it, which is no reason for another batch to fail."""
    with StandIn(world.key) as pool:
        folder = published(pool)
        on_removal.append(what)
        with told:
            publish_another(pool)
        (left,) = folder.parent.iterdir()
        assert left.name.startswith(f".removed-{folder.name}-")
        on_removal.clear()
        publish_another(pool, 8)
    assert not list(folder.parent.iterdir())


def test_a_batch_that_cannot_be_moved_away_stays_whole_and_another_batch_is_published(
    world, published, publish_another, monkeypatch, caplog
):
    move = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target.name.startswith(".removed-"):
            raise PermissionError(13, "Permission denied", str(path))
        return move(path, target)

    with StandIn(world.key) as pool:
        folder = published(pool)
        monkeypatch.setattr(Path, "rename", refuse)
        publish_another(pool)
    assert segments_of(folder)
    assert f"batch {folder.name} worked with cannot be removed: [Errno 13] Permission denied" in caplog.text
    with world.ledger() as ledger:
        assert in_ledger.registered(ledger, folder.name)


def test_a_run_that_begins_while_a_batch_is_deleted_keeps_what_it_prepares(
    world, published, five, publish_another, on_removal
):

    def begin(_: Path) -> None:
        world.run("two", world.spec(five))
        assert world.execute("prepare", "two").facts["to_do"] == 0

    with StandIn(world.key) as pool:
        folder = published(pool)
        on_removal.append(begin)
        publish_another(pool)
        assert list(folder.parent.iterdir()) == [folder]
        on_removal.clear()
        close(world, "two")
        publish_another(pool, 8)
    assert not list(folder.parent.iterdir())


def test_a_batch_that_was_prepared_again_goes_though_its_run_was_killed_before_the_ledger_heard_of_it(
    world, published, publish_another, monkeypatch
):
    def kill(*_: Any) -> None:
        raise Killed

    with StandIn(world.key) as pool:
        folder = published(pool)
        publish_another(pool)
        with monkeypatch.context() as patch:
            patch.setattr(in_ledger, "record", kill)
            with pytest.raises(Killed):
                world.execute("prepare", "one")
        world.execute("prepare", "one")
        close(world, "one")
        publish_another(pool, 8)
    assert not list(folder.parent.iterdir())


def test_a_batch_is_kept_for_its_retention_after_the_last_run_that_counted_on_it(
    world, published, five, publish_another, retention_s, two_hours_pass
):
    """The run of another output failed before it published; started again, it must find the answers."""
    retention_s[0] = 3600.0
    elsewhere = world.spec(five, batch={"output": str(world.root / "elsewhere")})
    with StandIn(world.key) as pool:
        folder = published(pool)
        two_hours_pass()
        world.run("two", elsewhere)
        world.execute("prepare", "two")
        close(world, "two", "failed")
        publish_another(pool)
        assert world.execute("prepare", "two").facts["to_do"] == 0
        close(world, "two", "failed")
        two_hours_pass()
        publish_another(pool, 8)
    assert not folder.exists()


def test_a_run_that_was_killed_while_it_prepared_holds_no_batch_for_ever(
    world, published, five, publish_another, retention_s, two_hours_pass
):
    retention_s[0] = 3600.0
    with StandIn(world.key) as pool:
        folder = published(pool)
        world.run("two", world.spec(five))
        with world.ledger() as ledger:
            take(ledger, "two", "prepare", frozenset({"prepare"}))
        for _ in range(13):
            two_hours_pass()
        publish_another(pool)
    assert not folder.exists()


def test_a_turn_that_was_not_asked_for_its_earlier_ones_sake_stays_failed_without_its_segment(
    world, run_stage, publish_another
):
    def refuse(worker: str, prompt: str, before: int) -> Does | None:
        return Does(status=400, body=b"no") if " r000 " in prompt else None

    path = write_input(world.root / "in" / "p.parquet", IDS[:4], who=["s", "s", None, None])
    spec = world.spec(path, batch={"session": "who"})
    with StandIn(world.key, behaviour=refuse) as pool:
        world.run("one", spec, pool.registry)
        folder = Path(work(world, run_stage, "one")["prepare"].facts["folder"])
        assert {row["error_class"] for row in world.published()} == {"BadRequest", "EarlierTurnFailed", None}
        close(world, "one")
        publish_another(pool)
        assert not folder.exists()
    done = world.execute("prepare", "one").facts
    assert (done["answered"], done["failed"], done["to_do"]) == (2, 2, 0)


def test_rows_that_were_registered_since_the_batch_was_published_are_kept(world, run_stage, publish_another):
    """A longer context has one more row answered; its run has failed before it published that."""
    path = world.root / "in" / "p.jsonl"
    path.parent.mkdir()
    path.write_text('{"row_id": "a", "prompt": "short"}\n{"row_id": "b", "prompt": "%s"}\n' % ("word " * 300))
    with StandIn(world.key) as pool:
        world.run("short", world.spec(path), pool.registry)
        work(world, run_stage, "short")
        world.run("long", world.spec(path, serving={"max_model_len": 1024}), pool.registry)
        world.execute("prepare", "long")
        assert run_stage("long").facts["answered"] == 2
        for run_id in ("short", "long"):
            close(world, run_id, "failed")
        publish_another(pool)
        assert work(world, run_stage, "long")["publish"].facts["answered"] == 2
        assert set(pool.asked.values()) == {1}


def test_segments_are_kept_for_an_open_run_that_counts_on_them(world, published, five, publish_another):
    """It publishes the batch elsewhere, where no published file has the rows."""
    elsewhere = world.spec(five, batch={"output": str(world.root / "elsewhere")})
    with StandIn(world.key) as pool:
        published(pool)
        world.run("two", elsewhere)
        assert world.execute("prepare", "two").facts["to_do"] == 0
        publish_another(pool)
        assert world.execute("publish", "two").facts["answered"] == 5


def test_segments_are_kept_while_a_run_prepares_and_may_be_about_to_count_them(
    world, published, five, publish_another
):
    with StandIn(world.key) as pool:
        folder = published(pool)
        world.run("two", world.spec(five))
        with world.ledger() as ledger:
            take(ledger, "two", "prepare", frozenset({"prepare"}))
            publish_another(pool)
    assert segments_of(folder)


def test_segments_are_kept_for_a_writer_who_comes_after_they_were_chosen(
    world, published, five, publish_another, monkeypatch
):
    with StandIn(world.key) as pool:
        folder = published(pool)
        choose, chosen = retention.past, []

        def then_a_run_writes(*arguments: Any) -> list[str]:
            chosen.extend(choose(*arguments))
            world.run("two", world.spec(five))
            world.execute("prepare", "two")
            return chosen

        monkeypatch.setattr(retention, "past", then_a_run_writes)
        publish_another(pool)
    assert chosen == [folder.name]
    assert segments_of(folder)
    with world.ledger() as ledger:
        assert in_ledger.registered(ledger, folder.name)


def test_nobody_can_take_the_batch_over_while_it_is_moved_away_and_nobody_waits_while_it_is_deleted(
    world, published, publish_another, on_removal, monkeypatch
):
    move, seen = Path.rename, []

    def is_locked() -> bool:
        with world.ledger() as ledger, ledger.transaction() as connection:
            query = "select batch_id from batch where batch_id = %s for update skip locked"
            return connection.execute(query, [folder.name]).fetchone() is None

    def look(path: Path, target: Path) -> Path:
        if target.name.startswith(".removed-"):
            seen.append(("moved", is_locked()))
        return move(path, target)

    with StandIn(world.key) as pool:
        folder = published(pool)
        monkeypatch.setattr(Path, "rename", look)
        on_removal.append(lambda _: seen.append(("deleted", is_locked())))
        publish_another(pool)
    assert seen == [("moved", True), ("deleted", False)]
    assert not folder.exists()
