"""A disk that is too small or fills up: a small one of its own, below the deployment's home. Needs root, for mount."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.errors import StageFailed
from tasks.weights import store
from tests.runs import wait_until
from tests.weights.test_convert import failing_environment
from tests.weights.world import FETCHED, REPO, Stalling, World, write_checkpoint

WEIGHTS = "model-00001-of-00002.safetensors"
DISK_MIB = 66
"""Just enough for tiny weights: a download leaves 64 MiB free."""


@pytest.fixture
def small_disk(world: World) -> Iterator[Path]:
    """The world's home, on a file system of `DISK_MIB`."""
    world.home.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", world.home]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield world.home
    subprocess.run(["umount", "--lazy", world.home], check=True)


def serve_weights_of(world: World, mib: int) -> None:
    shutil.rmtree(world.repositories / REPO)
    write_checkpoint(world.repositories / REPO, weights_bytes=mib * 2**20)


def fill(disk: Path) -> Path:
    """Leave not a byte."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for piece in (2**20, 4096, 1):
            try:
                while True:
                    file.write(bytes(piece))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    assert shutil.disk_usage(disk).free == 0
    return filler


def test_a_disk_that_cannot_hold_the_weights_is_refused_before_a_byte_is_fetched(
    world: World, small_disk: Path
) -> None:
    serve_weights_of(world, 8)
    run = world.start()

    with pytest.raises(StageFailed, match=r"fetching 0\.01 GB .* needs 0\.08 GB in .* 0\.07 GB are free"):
        world.execute("download")

    assert world.fetched() == []
    assert not store.download_folder(world.settings, REPO, run.pins["commit"]).exists()


def test_a_disk_that_fills_up_ends_the_download_which_goes_on_once_there_is_room(
    world: World, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,size=96m", small_disk], check=True)
    serve_weights_of(world, 24)
    run = world.start()
    folder = store.download_folder(world.settings, REPO, run.pins["commit"])
    spare, stalling = small_disk / "spare", Stalling(WEIGHTS, after_mib=12)
    spare.mkdir()
    world.hub.faults = stalling
    with world.executing("download") as process:
        wait_until(stalling.stalled.is_set)
        filler = fill(spare)
        stalling.go_on.set()
        _, said = process.communicate(timeout=60)

    assert process.returncode != 0
    assert f"the disk below {world.settings.store} is full" in said
    assert not folder.exists()

    filler.unlink()
    world.hub.seen.clear()
    world.execute("download")
    ranges = [seen.range for seen in world.hub.seen if seen.path.endswith(WEIGHTS)]
    assert str(ranges[0]).startswith("bytes=")
    assert (folder / WEIGHTS).read_bytes() == (world.repositories / REPO / WEIGHTS).read_bytes()


def test_a_disk_that_is_full_when_a_release_is_made_leaves_none_and_says_so(
    world: World, small_disk: Path
) -> None:
    world.start()
    world.execute("download")
    filler = fill(small_disk)

    with pytest.raises(
        StageFailed, match=r"the disk is full.*nothing that convert was making.*remove-release"
    ):
        world.execute("convert")

    assert not list(world.settings.store.glob("releases/*"))
    filler.unlink()
    world.execute("convert")
    folder = Path(world.facts("convert")["path"])
    assert {path.name for path in folder.iterdir()} == FETCHED | {store.MANIFEST}
    assert world.staging() == []


def test_a_converter_that_fills_the_disk_is_told_from_one_that_fails(world: World, small_disk: Path) -> None:
    greedy = failing_environment(small_disk / "env", world.settings.python_convert)
    greedy.write_text("#!/bin/sh\ncat /dev/zero > filler\nexit 1\n")
    world.start(scheme="fp8")
    world.execute("download")

    with pytest.raises(StageFailed, match="the converter ended with status 1 on a full disk: make room"):
        world.execute("convert", settings=world.settings_with(python_convert=greedy))

    assert world.staging() == []
    assert not list(world.settings.store.glob("releases/*"))


def test_a_full_disk_keeps_nobody_from_a_release_that_is_whole(world: World, small_disk: Path) -> None:
    world.start()
    world.execute("download", "convert")
    shutil.rmtree(world.settings.store / "proven")
    fill(small_disk)

    assert not world.execute("convert").changed
