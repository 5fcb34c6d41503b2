"""Weights from a folder of the node; and what a branch or tag stood for, where two stand for one commit."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tasks.errors import InputError, StageFailed
from tasks.weights import store
from tasks.weights.pin import pin
from tests.runs import a_spec
from tests.weights.world import FETCHED, REPO, World, write_checkpoint, write_safetensors

WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "models" / "tiny")


def test_a_folder_is_taken_like_a_repository_without_a_hub(world: World, folder: Path) -> None:
    offline = world.settings_with(HF_HUB_OFFLINE=True)
    world.start(repo=str(folder))

    result = world.execute("download", settings=offline)

    copy = Path(result.facts["path"])
    assert {path.name for path in copy.iterdir()} - {store.DOWNLOAD_MANIFEST} == FETCHED
    assert (copy / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert not world.hub.seen
    assert world.execute("convert").changed
    assert not world.execute("download", settings=offline).changed


def test_another_content_of_a_folder_is_another_release(world: World, folder: Path) -> None:
    first = world.start("run-1", repo=str(folder))
    write_safetensors(folder / "model-00003.safetensors", {"x": ("BF16", (2, 2))})
    second = world.start("run-2", repo=str(folder))

    assert first.pins["release_id"] != second.pins["release_id"]
    with pytest.raises(InputError, match="was changed since this run started"):
        world.execute("download", run_id="run-1")


def test_a_folder_that_is_not_there_is_bad_input(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.repo: there is no folder"):
        world.start(repo=str(tmp_path / "absent"))


def test_a_link_that_leads_out_of_a_folder_is_not_followed(
    world: World, folder: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (folder / "notes.txt").symlink_to(secret)
    world.start(repo=str(folder))

    copy = Path(world.execute("download").facts["path"])

    assert not (copy / "notes.txt").exists()


def test_a_second_tag_of_a_downloaded_commit_is_known_offline_too(world: World) -> None:
    commit = world.start("run-1").pins["commit"]
    world.execute("download")
    tagged = a_spec(model={"repo": REPO, "revision": "v1"}, convert={"scheme": "none"})
    offline = world.settings_with(HF_HUB_OFFLINE=True)
    with pytest.raises(InputError, match="'v1' is not in"):
        pin(tagged, offline)
    world.hub.tags = {"v1": commit}
    world.start("run-2", revision="v1")
    world.hub.seen.clear()

    result = world.execute("download", run_id="run-2")

    assert result.changed
    assert world.fetched() == []
    assert pin(tagged, offline)["commit"] == commit
    assert not world.execute("download", run_id="run-2").changed


def test_an_older_run_does_not_take_back_what_a_branch_stands_for_now(world: World) -> None:
    world.start("run-1")
    world.execute("download", run_id="run-1")
    write_safetensors(world.repositories / REPO / "model-00003.safetensors", {"x": ("BF16", (2, 2))})
    newer = world.start("run-2").pins["commit"]
    world.execute("download", run_id="run-2")

    assert not world.execute("download", run_id="run-1").changed

    spec = a_spec(model={"repo": REPO}, convert={"scheme": "none"})
    assert pin(spec, world.settings_with(HF_HUB_OFFLINE=True))["commit"] == newer


@pytest.fixture
def small_disk(world: World) -> Path:
    """The store on a file system of 4 MiB."""
    world.settings.store.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", world.settings.store], check=True)
    yield world.settings.store
    subprocess.run(["umount", "--lazy", world.settings.store], check=True)


def test_a_disk_that_is_too_small_is_refused_with_numbers(world: World, small_disk: Path) -> None:
    world.start()

    with pytest.raises(StageFailed, match=r"needs 0\.0\d GB in .* and 0\.00 GB are free"):
        world.execute("download")

    assert world.fetched() == []


def test_a_disk_that_fills_up_meanwhile_publishes_nothing_and_the_next_try_ends_well(
    world: World, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(world.repositories / REPO)
    write_checkpoint(world.repositories / REPO, weights_bytes=2**20)
    run = world.start()
    filler = small_disk / "filler"
    filler.write_bytes(bytes(7 * 2**19))
    monkeypatch.setattr(store, "require_space", lambda *_: None)

    with pytest.raises(StageFailed, match=r"the disk below .* is full"):
        world.execute("download")

    assert not store.download_folder(world.settings, REPO, run.pins["commit"]).exists()
    filler.unlink()
    assert world.execute("download").changed
    assert world.staging() == []
