"""Download and conversion killed at random moments, again and again: in the end the same release, byte for byte.

tests/kill kills at every point where something becomes durable; here the clock decides, and the converting
children are real. QWEN_TEST_EVERYTHING kills twenty times each.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tasks.node import processes
from tasks.weights import store
from tests.runs import wait_until
from tests.weights.converted import serve
from tests.weights.world import REPO, World, write_checkpoint

EVERYTHING = bool(os.environ.get("QWEN_TEST_EVERYTHING"))
SEED = int(os.environ.get("QWEN_TEST_SEED", "20480"))


def kill_at_random_moments(world: World, stage: str, kills: int, longest_s: float, watched: Path) -> int:
    """Returns how many were killed before they had ended by themselves."""
    moments = random.Random(SEED)
    killed = 0
    for _ in range(kills):
        with world.executing(stage) as process:
            try:
                process.wait(moments.uniform(0.0, longest_s))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                killed += 1
        nothing_half_made_is_visible(world, watched)
        wait_until(lambda: not processes.find(f"run-1/{stage}"))
    return killed


def nothing_half_made_is_visible(world: World, folder: Path) -> None:
    if folder.exists():
        names = (store.MANIFEST, store.DOWNLOAD_MANIFEST)
        (manifest,) = (found for name in names if (found := store.read_manifest(folder / name)))
        assert store.wrong_files(folder, manifest, world.settings, distrust=True) == []


def test_a_download_killed_at_random_moments_ends_as_if_it_never_was(world: World) -> None:
    shutil.rmtree(world.repositories / REPO)
    source = write_checkpoint(world.repositories / REPO, weights_bytes=48 * 2**20)
    run = world.start()
    folder = store.download_folder(world.settings, REPO, run.pins["commit"])
    began = time.monotonic()
    world.execute("download")
    longest_s = time.monotonic() - began + 2.0  # the process must start first
    manifest = (folder / store.DOWNLOAD_MANIFEST).read_bytes()
    shutil.rmtree(folder)

    killed = kill_at_random_moments(world, "download", 20 if EVERYTHING else 5, longest_s, folder)

    assert killed > 0
    world.execute("download")
    assert (folder / store.DOWNLOAD_MANIFEST).read_bytes() == manifest
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in source.glob("model-*"))
    assert world.staging() == []


@pytest.mark.timeout(3600)
@pytest.mark.everything
def test_a_conversion_killed_at_random_moments_ends_as_if_it_never_was(
    world: World,
    conversions: Path,
) -> None:
    serve(world, conversions / "base" / "qwen2")
    run = world.start(scheme="fp8")
    world.execute("download")
    began = time.monotonic()
    world.execute("convert")
    longest_s = time.monotonic() - began
    folder = store.release_folder(world.settings, run.pins["release_id"])
    manifest = (folder / store.MANIFEST).read_bytes()
    shutil.rmtree(folder)

    killed = kill_at_random_moments(world, "convert", 20 if EVERYTHING else 1, longest_s, folder)

    assert killed > 0
    world.execute("convert")
    assert (folder / store.MANIFEST).read_bytes() == manifest
    nothing_half_made_is_visible(world, folder)
    assert world.staging() == []
