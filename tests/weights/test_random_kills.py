"""Download and conversion killed at random moments, again and again: in the end the same release, byte for byte.

tests/kill kills at every point where something becomes durable; here the clock decides, and the converting
children are real. QWEN_TEST_EVERYTHING kills twenty times each.
"""

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasks.node import processes
from tasks.weights import store
from tests.runs import wait_until
from tests.weights.converted import run_in_converting_environment, serve
from tests.weights.world import REPO, World, write_checkpoint

EVERYTHING = bool(os.environ.get("QWEN_TEST_EVERYTHING"))
SEED = int(os.environ.get("QWEN_TEST_SEED", "20480"))


def kill_at_random_moments(world: World, stage: str, kills: int, longest_s: float, watched: Path) -> None:
    """Kill the stage that often. One that ends before it is killed is made to begin anew, and does not count."""
    moments = random.Random(SEED)
    killed_after_s: list[float] = []
    while len(killed_after_s) < kills:
        after_s = moments.uniform(0.0, longest_s)
        with world.executing(stage) as process:
            try:
                said = process.communicate(timeout=after_s)
                assert process.returncode == 0, said
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                killed_after_s.append(round(after_s, 1))
        nothing_half_made_is_visible(world, watched)
        wait_until(lambda: not processes.find(f"run-1/{stage}"))
        if process.returncode == 0:
            take_away(watched)
    print(f"{stage} killed after {killed_after_s} s of at most {longest_s:.1f}")


def nothing_half_made_is_visible(world: World, folder: Path) -> None:
    if folder.exists():
        names = (store.MANIFEST, store.DOWNLOAD_MANIFEST)
        (manifest,) = (found for name in names if (found := store.read_manifest(folder / name)))
        assert store.wrong_files(folder, manifest, world.settings, distrust=True) == []


def take_away(folder: Path) -> None:
    """In one step, so that an onlooker never sees half of it."""
    elsewhere = folder.parents[2] / "taken-away"
    folder.rename(elsewhere)
    shutil.rmtree(elsewhere)


@contextmanager
def an_onlooker(folder: Path) -> Iterator[None]:
    """Somebody who looks at the folder all the time; fails when it was ever seen without all of its files."""
    seen: list[str] = []
    looks, over = 0, threading.Event()

    def look() -> None:
        nonlocal looks
        while not over.wait(0.005):
            looks += 1
            try:
                there = {path.name: path.stat().st_size for path in folder.iterdir()}
            except OSError:
                continue  # not there, or just being taken away
            name = store.MANIFEST if store.MANIFEST in there else store.DOWNLOAD_MANIFEST
            manifest = store.read_manifest(folder / name)
            if manifest is None:
                seen.extend(there if folder.exists() else [])
            elif folder.exists():
                seen.extend(one for one, file in manifest.files.items() if there.get(one) != file.size)

    onlooker = threading.Thread(target=look)
    onlooker.start()
    try:
        yield
    finally:
        over.set()
        onlooker.join()
    assert looks > 100
    assert seen == []


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

    with an_onlooker(folder):
        kill_at_random_moments(world, "download", 20 if EVERYTHING else 3, longest_s, folder)
        world.execute("download")

    assert (folder / store.DOWNLOAD_MANIFEST).read_bytes() == manifest
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in source.glob("model-*"))
    assert world.staging() == []


@pytest.mark.timeout(3600)
@pytest.mark.everything
def test_a_conversion_killed_at_random_moments_ends_as_if_it_never_was(world: World, tmp_path: Path) -> None:
    run_in_converting_environment("make_checkpoints.py", tmp_path / "base")
    serve(world, tmp_path / "base" / "qwen2")
    run = world.start(scheme="fp8")
    world.execute("download")
    began = time.monotonic()
    world.execute("convert")
    longest_s = time.monotonic() - began
    folder = store.release_folder(world.settings, run.pins["release_id"])
    manifest = (folder / store.MANIFEST).read_bytes()
    shutil.rmtree(folder)

    with an_onlooker(folder):
        kill_at_random_moments(world, "convert", 20, longest_s, folder)
        world.execute("convert")

    assert (folder / store.MANIFEST).read_bytes() == manifest
    nothing_half_made_is_visible(world, folder)
    assert world.staging() == []
