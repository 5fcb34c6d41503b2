"""Download, against a hub that is real in protocol and fails on demand, with the real client."""

import json
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from demo.hub_faults import Faults, Refusal
from tasks.errors import InputError, StageFailed, Unavailable
from tasks.weights import hub, store
from tasks.weights.download import wanted
from tasks.weights.hub import RemoteFile
from tests.runs import outputs, wait_until
from tests.weights.world import FETCHED, REPO, Stalling, World, write_checkpoint, write_safetensors

WEIGHTS = "model-00001-of-00002.safetensors"


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()} - {store.DOWNLOAD_MANIFEST}


def serve_large_weights(world: World) -> None:
    """Larger than the pieces of 10 MB in which the client writes."""
    shutil.rmtree(world.repositories / REPO)
    write_checkpoint(world.repositories / REPO, weights_bytes=24 * 2**20)


def test_a_download_holds_what_a_checkpoint_is_made_of_byte_for_byte(world: World) -> None:
    run = world.start()

    result = world.execute("download")

    folder = Path(result.facts["path"])
    source = world.repositories / REPO
    assert result.changed
    assert files_in(folder) == FETCHED
    assert all((folder / name).read_bytes() == (source / name).read_bytes() for name in FETCHED)
    assert result.facts["commit"] == run.pins["commit"]
    assert result.facts["bytes"] == sum((source / name).stat().st_size for name in FETCHED)
    assert world.staging() == []


def test_a_second_download_asks_the_hub_nothing_and_hashes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start()
    world.execute("download")
    world.hub.seen.clear()
    hashed: list[Path] = []
    monkeypatch.setattr(store, "sha256_of_all", lambda paths: [hashed.append(path) or "" for path in paths])

    result = world.execute("download")

    assert not result.changed
    assert result.message.startswith("nothing to do")
    assert not world.hub.seen
    assert hashed == []


def test_a_file_deleted_behind_its_back_is_fetched_again_alone(world: World) -> None:
    world.start()
    folder = Path(world.execute("download").facts["path"])
    others = {path: path.stat().st_ino for path in folder.iterdir() if path.name in FETCHED - {WEIGHTS}}
    (folder / WEIGHTS).unlink()
    world.hub.seen.clear()

    result = world.execute("download")

    assert result.changed
    assert world.fetched() == [WEIGHTS]
    assert (folder / WEIGHTS).read_bytes() == (world.repositories / REPO / WEIGHTS).read_bytes()
    assert {path: path.stat().st_ino for path in others} == others
    assert world.staging() == []


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_byte_changed_behind_its_back_is_noticed_though_the_size_is_the_same(
    world: World, name: str
) -> None:
    world.start()
    path = Path(world.execute("download").facts["path"]) / name
    right = path.read_bytes()
    path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    os.utime(path, ns=(1, 1))
    world.hub.seen.clear()

    world.execute("download")

    assert path.read_bytes() == right
    assert world.fetched() == [name]


def test_a_stray_file_in_a_download_is_removed(world: World) -> None:
    world.start()
    folder = Path(world.execute("download").facts["path"])
    write_safetensors(folder / "stray.safetensors", {"x": ("BF16", (2, 2))})

    assert world.execute("download").changed
    assert files_in(folder) == FETCHED


def test_a_lost_manifest_costs_no_second_transfer(world: World) -> None:
    world.start()
    folder = Path(world.execute("download").facts["path"])
    (folder / store.DOWNLOAD_MANIFEST).unlink()
    world.hub.seen.clear()

    world.execute("download")

    assert world.fetched() == []
    assert files_in(folder) == FETCHED


def test_wrong_bytes_of_the_right_size_fail_and_are_fetched_again_later(world: World) -> None:
    run = world.start()
    world.hub.faults = Faults(wrong_bytes=frozenset({WEIGHTS}))

    with pytest.raises(StageFailed, match=f"{WEIGHTS}.*does not have the hash"):
        world.execute("download")

    assert len(world.fetched(WEIGHTS)) == 3
    assert not store.download_folder(world.settings, REPO, run.pins["commit"]).exists()
    world.hub.faults = Faults()
    world.hub.seen.clear()
    world.execute("download")
    assert WEIGHTS in world.fetched()


def test_a_body_that_ends_early_is_continued_where_it_ended(world: World) -> None:
    serve_large_weights(world)
    world.start()
    world.hub.faults = Faults(truncated={WEIGHTS: 1})

    folder = Path(world.execute("download").facts["path"])

    ranges = [seen.range for seen in world.hub.seen if seen.path.endswith(WEIGHTS)]
    assert ranges[0] is None
    assert str(ranges[1]).startswith("bytes=")
    assert (folder / WEIGHTS).read_bytes() == (world.repositories / REPO / WEIGHTS).read_bytes()


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_asks_for_a_pause_gets_it(
    world: World, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start()
    world.hub.faults = Faults(refusals=(Refusal(status, 1, "/resolve/", retry_after_s=7),))
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)

    assert world.execute("download").changed
    assert [pause for pause in waited if pause >= 1] == [7.0]


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_asks_for_an_hour_is_left_alone(
    world: World, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start()
    world.hub.faults = Faults(refusals=(Refusal(status, 10_000, "/resolve/", retry_after_s=3600),))
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)

    with pytest.raises(Unavailable, match=f"answered {status}.*try again later"):
        world.execute("download")
    assert [pause for pause in waited if pause >= 1] == []


def test_a_hash_that_the_hub_announces_wrong_is_not_believed_nor_the_file(world: World) -> None:
    run = world.start()
    world.hub.faults = Faults(wrong_hash=frozenset({WEIGHTS}))

    with pytest.raises(StageFailed, match=f"{WEIGHTS}.*does not have the hash.*Nothing was published"):
        world.execute("download")

    assert not store.download_folder(world.settings, REPO, run.pins["commit"]).exists()


def test_a_hub_that_stays_away_is_unavailable_after_bounded_tries(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_FIRST_WAIT_S", 0.01)
    world.start()
    world.hub.faults = Faults(refusals=(Refusal(503, 10_000, "/resolve/"),))

    with pytest.raises(Unavailable, match=r"answered 503.*try again later"):
        world.execute("download")


def test_a_repository_that_does_not_exist_is_bad_input(world: World) -> None:
    with pytest.raises(InputError, match=r"model\.repo: there is no repository owner/absent"):
        world.start(repo="owner/absent")


def test_a_revision_that_does_not_exist_is_bad_input(world: World) -> None:
    with pytest.raises(InputError, match=r"model\.revision: repository owner/Tiny-Qwen2 .* 'v9'"):
        hub.commit_of(REPO, "v9", world.settings)


def test_a_name_that_is_none_is_bad_input(world: World) -> None:
    with pytest.raises(InputError, match=r"model\.repo: '../../etc'"):
        hub.commit_of("../../etc", "main", world.settings)


def test_pickled_weights_are_refused(world: World) -> None:
    folder = world.repositories / "owner/pickled"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    world.start(repo="owner/pickled")

    with pytest.raises(InputError, match=r"safetensors only.*pytorch_model\.bin"):
        world.execute("download")


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json",
        "/etc/evil.json",
        "a/../../evil.json",
        "a//b.json",
        "a\\..\\b.json",
        "./a.json",
        "a\n.json",
    ],
)
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    good = RemoteFile("model.safetensors", 1, "0" * 64, None)

    with pytest.raises(InputError, match="outside of its"):
        wanted([good, RemoteFile(name, 1, None, "0" * 40)])


def test_a_link_in_place_of_a_file_is_not_taken_for_it(world: World, tmp_path: Path) -> None:
    world.start()
    folder = Path(world.execute("download").facts["path"])
    moved = tmp_path / "elsewhere"
    (folder / WEIGHTS).rename(moved)
    (folder / WEIGHTS).symlink_to(moved)

    assert world.execute("download").changed
    assert not (folder / WEIGHTS).is_symlink()


def test_a_full_disk_is_refused_before_anything_is_fetched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))

    with pytest.raises(StageFailed, match=r"needs .* GB .* are free"):
        world.execute("download")

    assert world.fetched() == []


def test_a_file_that_cannot_be_written_is_not_told_as_a_hub_that_is_away(
    world: World, tmp_path: Path
) -> None:
    nowhere = tmp_path / "gone" / "model.safetensors.part"
    file = RemoteFile("model.safetensors", 1, None, None)
    with pytest.raises(StageFailed, match=r"gone/model\.safetensors\.part cannot be written: No such file"):
        hub.fetch(REPO, "main", file, nowhere, world.settings, lambda _: None)
    assert world.fetched() == []


def test_offline_takes_what_is_on_disk_and_nothing_else(world: World) -> None:
    world.start()
    world.execute("download")
    offline = world.settings_with(HF_HUB_OFFLINE=True)
    world.hub.seen.clear()

    from tasks.weights.pin import pin
    from tests.runs import a_spec

    pins = pin(a_spec(model={"repo": REPO}, convert={"scheme": "none"}), offline)
    assert pins["commit"] == world.facts("download")["commit"]
    assert not world.execute("download", settings=offline).changed
    assert not world.hub.seen
    with pytest.raises(InputError, match=r"model\.revision: owner/other at 'main' is not in"):
        pin(a_spec(model={"repo": "owner/other"}, convert={"scheme": "none"}), offline)


def test_a_download_killed_in_the_middle_goes_on_where_it_was(world: World) -> None:
    serve_large_weights(world)
    run = world.start()
    stalling = Stalling(WEIGHTS, after_mib=12)
    world.hub.faults = stalling
    with world.executing("download") as process:
        wait_until(stalling.stalled.is_set)
        part = world.home / "store/staging" / world.staging()[0] / f"{WEIGHTS}.part"
        wait_until(lambda: part.exists() and part.stat().st_size > 0)
        process.kill()
        process.wait()
    stalling.go_on.set()
    assert not store.download_folder(world.settings, REPO, run.pins["commit"]).exists()
    world.hub.seen.clear()

    folder = Path(world.execute("download").facts["path"])

    ranges = [seen.range for seen in world.hub.seen if seen.path.endswith(WEIGHTS)]
    assert str(ranges[0]).startswith("bytes=")
    assert (folder / WEIGHTS).read_bytes() == (world.repositories / REPO / WEIGHTS).read_bytes()
    assert world.staging() == []


def test_two_runs_that_want_one_download_fetch_it_once(world: World) -> None:
    world.start("run-1")
    world.start("run-2")

    with world.executing("download", "run-1") as one, world.executing("download", "run-2") as other:
        said = outputs([one, other], timeout_s=300)

    assert sorted(world.fetched()) == sorted(FETCHED)
    assert "changed\n" in said


def test_progress_ends_at_the_size_of_all_files(world: World) -> None:
    world.start()
    size = world.execute("download").facts["bytes"]

    with world.ledger.transaction() as connection:
        row: Any = connection.execute(
            "select done, total, unit from progress where stage = 'download'"
        ).fetchone()
    assert (row["done"], row["total"], row["unit"]) == (size, size, "bytes")


def test_a_manifest_is_the_same_text_for_the_same_commit(world: World) -> None:
    world.start()
    folder = Path(world.execute("download").facts["path"])
    first = (folder / store.DOWNLOAD_MANIFEST).read_text()
    shutil.rmtree(folder)

    world.execute("download")

    assert (folder / store.DOWNLOAD_MANIFEST).read_text() == first
    assert set(json.loads(first)["files"]) == FETCHED
