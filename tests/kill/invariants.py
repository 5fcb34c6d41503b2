"""What must hold after a stage was killed and run again. Each raises AssertionError and says what is wrong.

Combine them with `all_of`; later parts of the pipeline add theirs here.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from tasks.node.processes import PART, Process
from tests.kill.world import World

Check = Callable[[World], None]

PROCESS_DEADLINE_S = 5.0
"""A process that was killed or that loses its parent is gone by then."""


def all_of(*checks: Check) -> Check:
    """All of them, in this order."""

    def check(world: World) -> None:
        for one in checks:
            one(world)

    return check


def after_a_stage(world: World) -> None:
    """What holds after every stage that leaves no process behind."""
    all_of(no_process_left(), no_live_claim(), node_locks_are_free(), no_staging_left, one_lease_at_most)(
        world
    )


def no_process_left(*but: str) -> Check:
    """No process of the deployment lives, except parts that begin with one of `but` (as `RUN/keeper`)."""

    def check(world: World) -> None:
        deadline = time.monotonic() + PROCESS_DEADLINE_S
        while (left := _others(world, but)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"{len(left)} process(es) are left: {'; '.join(map(_describe, left))}"

    return check


def no_live_claim(*but: str) -> Check:
    """No claim is live, except those of the stages `but` (as `keeper`)."""

    def check(world: World) -> None:
        live = world.rows("select run_id, stage, epoch from claim where ended_at is null order by epoch")
        live = [row for row in live if row["stage"] not in but]
        assert not live, f"claims are live that nobody acts under: {live}"

    return check


def node_locks_are_free(*but: str) -> Check:
    """Nobody holds a lock of the node, except those files."""

    def check(world: World) -> None:
        for path in sorted(world.settings.locks.rglob("*")):
            if not path.is_file() or path.name in but:
                continue
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AssertionError(f"the node lock {path.name} is held: {path.read_text()}") from None
            finally:
                os.close(descriptor)

    return check


def no_staging_left(world: World) -> None:
    """No half-made thing lies in the store."""
    left = [
        str(path.relative_to(world.home))
        for path in sorted(world.settings.store.rglob("*"))
        if path.parent.name == "staging" or path.name.endswith((".new", ".partial", ".incomplete", ".tmp"))
    ]
    assert not left, f"left in the store: {', '.join(left)}"


def one_lease_at_most(world: World) -> None:
    """No device is in two live leases, and no run holds two."""
    if not world.rows("select 1 as there where to_regclass('ledger.lease') is not null"):
        return
    twice = world.rows(
        "select run_id, count(*) as leases from lease where state <> 'released' "
        "group by run_id having count(*) > 1"
    )
    assert not twice, f"runs with more than one live lease: {twice}"


def one_file_each(folder: str, *names: str) -> Check:
    """`folder` (below the world's root) holds exactly these names, and nothing else."""

    def check(world: World) -> None:
        found = sorted(path.name for path in (world.root / folder).iterdir())
        assert found == sorted(names), f"{folder} holds {found} instead of {sorted(names)}"

    return check


def manifest_agrees(manifest: Path, files: Sequence[dict[str, Any]] | None = None) -> None:
    """Every file that a manifest names is there, with its SHA-256; an absent manifest promises nothing.

    Args:
        files: entries with `path`, `bytes` and `sha256`; by default the list under `files` in the manifest.
    """
    if not manifest.exists():
        return
    promised = json.loads(manifest.read_text())["files"] if files is None else files
    entries = promised.items() if isinstance(promised, dict) else ((one["path"], one) for one in promised)
    for name, entry in entries:
        path = manifest.parent / name
        assert path.exists(), f"{manifest} names {name}, which is not there"
        content = path.read_bytes()
        size = entry.get("bytes", entry.get("size", len(content)))
        assert len(content) == size, f"{path} has {len(content)} bytes, its manifest says {size}"
        assert sha256(content).hexdigest() == entry["sha256"], f"{path} is not what its manifest says"


def _others(world: World, but: Sequence[str]) -> list[Process]:
    parts = [(process, _part(process.pid)) for process in world.processes()]
    return [process for process, part in parts if part is not None and not part.startswith(tuple(but))]


def _part(pid: int) -> str | None:
    try:
        marks = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = [mark.decode().partition("=")[2] for mark in marks if mark.startswith(PART.encode() + b"=")]
    return found[0] if found else ""


def _describe(process: Process) -> str:
    try:
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = [b"gone"]
    return f"{process.pid} ({_part(process.pid)}): {b' '.join(words).decode(errors='replace')[:120]}"
