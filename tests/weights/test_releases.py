"""The releases of a node: listed, verified, removed; and a run that is given one."""

import json
from pathlib import Path

import pytest
from psycopg.types.json import Jsonb

from tasks import settings as deployment
from tasks import stages
from tasks.cli import main
from tasks.errors import Busy, InputError, StageFailed
from tasks.ledger import close
from tasks.node import lock
from tasks.weights import releases, store
from tests.weights.world import REPO, World

WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.fixture
def made(world: World) -> Path:
    """A release, made by a run that is over."""
    world.start()
    world.execute("download", "convert")
    close(world.ledger, "run-1", "done")
    return Path(world.facts("convert")["path"])


def serve_by(world: World, run_id: str, release: Path) -> None:
    with world.ledger.transaction() as connection:
        connection.execute("select set_config('ledger.acting', 'test', true)")
        connection.execute(
            "insert into pool (pool_id, run_id, node, release_id, release_path, slots) values (%s, %s, %s, %s, %s, %s)",
            ("pool-1", run_id, world.settings.node, release.name, str(release), Jsonb([])),
        )


def test_the_list_says_what_a_release_is_and_who_needs_it(world: World, made: Path) -> None:
    world.start("run-2")

    (release,) = releases.listing(world.settings, world.ledger)

    assert (release.release_id, release.path, release.users) == (made.name, made, ("run-2",))
    assert release.facts()["metrics"]["base_bytes"] > 0


def test_verifying_reads_every_byte_though_the_file_looks_untouched(world: World, made: Path) -> None:
    assert releases.verify(made.name, world.settings, world.ledger).release_id == made.name
    path = made / "tokenizer.json"
    look = path.stat()
    path.write_bytes(path.read_bytes().replace(b"1.0", b"1.1"))
    note = world.settings.store / "proven" / f"releases--{made.name}.json"
    noted = json.loads(note.read_text())
    now = path.stat()
    noted["tokenizer.json"] = [look.st_size, now.st_mtime_ns, now.st_ino]
    note.write_text(json.dumps(noted))

    with pytest.raises(StageFailed, match=r"not as its manifest says: tokenizer\.json"):
        releases.verify(made.name, world.settings, world.ledger)


def test_a_release_that_nobody_needs_is_removed_and_can_be_made_again(world: World, made: Path) -> None:
    releases.remove(made.name, world.settings, world.ledger, force=False)

    assert not made.exists()
    assert world.staging() == []
    assert releases.listing(world.settings, world.ledger) == []
    with world.ledger.transaction() as connection:
        assert world.ledger.queries.run_by_id(connection, run_id="run-1")["verdict"] == "done"
    world.start("run-2")
    assert world.execute("convert", run_id="run-2").changed
    assert made.exists()


def test_a_release_that_an_open_run_is_pinned_to_is_kept_unless_forced(world: World, made: Path) -> None:
    world.start("run-2")

    with pytest.raises(Busy, match="open run run-2"):
        releases.remove(made.name, world.settings, world.ledger, force=False)
    assert made.exists()

    releases.remove(made.name, world.settings, world.ledger, force=True)
    assert not made.exists()


def test_a_release_that_is_served_is_kept_even_when_forced(world: World, made: Path) -> None:
    serve_by(world, "run-1", made)

    with pytest.raises(Busy, match="served by the workers of run run-1"):
        releases.remove(made.name, world.settings, world.ledger, force=True)
    assert made.exists()


def test_a_release_that_is_being_made_is_kept(
    world: World, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "_LOCK_WAIT_S", 0.0)

    with (
        lock.held(world.settings.locks / f"release-{made.name}.lock", "making of it for run other", 0),
        pytest.raises(Busy, match="run other"),
    ):
        releases.remove(made.name, world.settings, world.ledger, force=True)


def test_an_unknown_release_is_bad_input_and_the_known_ones_are_named(world: World, made: Path) -> None:
    with pytest.raises(InputError, match=f"no release 'other'.*{made.name}"):
        releases.verify("other", world.settings, world.ledger)


def test_the_command_line_lists_verifies_and_removes(
    world: World, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    deployment.current.cache_clear()

    for verb, name in (("releases", []), ("verify-release", [made.name]), ("remove-release", [made.name])):
        assert main([verb, *name, "--json"]) == 0
        assert made.name in capsys.readouterr().out
    assert main(["verify-release", made.name]) == 2
    assert not made.exists()


def test_a_run_that_is_given_a_release_needs_neither_hub_nor_download(world: World, made: Path) -> None:
    download = Path(world.facts("download")["path"])
    store.remove(download)
    world.hub.seen.clear()

    run = world.start("run-2", repo=f"release:{made.name}", scheme="awq")
    results = [world.execute(name, run_id="run-2") for name in ("download", "convert")]

    assert run.pins["release_id"] == made.name
    assert [result.changed for result in results] == [False, False]
    assert world.facts("convert", "run-2")["path"] == str(made)
    assert (Path(world.facts("download", "run-2")["path"]) / "tokenizer.json").exists()
    assert not world.hub.seen


def test_a_run_that_is_given_a_damaged_release_says_who_can_mend_it(world: World, made: Path) -> None:
    world.start("run-2", repo=f"release:{made.name}")
    (made / WEIGHTS).unlink()

    with pytest.raises(StageFailed, match=f"a run of its repository .{REPO}. .* mends it"):
        world.execute("convert", run_id="run-2")


def test_a_run_that_is_given_no_release_that_exists_does_not_start(world: World, made: Path) -> None:
    with pytest.raises(InputError, match=f"no release 'other'.*{made.name}"):
        world.start("run-2", repo="release:other")
    with pytest.raises(InputError, match="no run 'run-2'"):
        stages.load(world.ledger, "run-2")
