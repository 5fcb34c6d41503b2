"""The simulated node, in a file that processes share.

Keeps: a reader sees a whole state (the file is replaced, never written over), and changes happen one after the
other (flock on a file beside it), as in a driver. So a process killed within a call leaves it done or not done.
The file beside it also counts changes, in memory that processes share, so that a call costs no system call.
"""

import fcntl
import json
import mmap
import os
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.errors import InputError
from tasks.gpu.simulated.products import PRODUCTS

State = dict[str, Any]


class StateFile:
    """One simulated node."""

    def __init__(self, path: Path, node: str) -> None:
        """
        Args:
            path: made when it is not there; its folder must be.
            node: `PRODUCT` or `PRODUCT*COUNT`.

        Raises:
            InputError: there is no such product, or the file holds another node.
        """
        self.path = path
        product, _, count = node.partition("*")
        if product not in PRODUCTS or not (count or "8").isdigit() or not 1 <= int(count or "8") <= 16:
            raise InputError(
                f"QWEN_PIPELINE_NVML=sim:{node}: a simulated node is sim:PRODUCT or sim:PRODUCT*COUNT, with one "
                f"of {', '.join(PRODUCTS)} and 1 to 16 GPUs"
            )
        self._seen: int | None = None
        self._state: State = {}
        if not path.parent.is_dir():
            raise InputError(f"QWEN_PIPELINE_NVML_STATE={path}: there is no folder {path.parent}; make it")
        self._changes = _shared_number(self._lock_path)
        with self._locked():
            if not path.exists():
                self._write(new_node(product, int(count or "8")))
        there = self.read()
        if (there["product"], len(there["gpus"])) != (product, int(count or "8")):
            raise InputError(
                f"QWEN_PIPELINE_NVML=sim:{node}, and {path} holds {there['product']}*{len(there['gpus'])}: name "
                f"another file with QWEN_PIPELINE_NVML_STATE, or remove that one"
            )

    def read(self) -> State:
        """The state now; not to be changed."""
        number = self._number()
        # Odd: somebody is changing it, or died doing so.
        if number != self._seen or number % 2:
            self._state = json.loads(self.path.read_text())
            self._seen = number
        return self._state

    @contextmanager
    def changing(self) -> Iterator[State]:
        """The state, to be changed within the block; kept when the block ends well."""
        with self._locked():
            state: State = json.loads(self.path.read_text())
            yield state
            self._write(state)

    def _write(self, state: State) -> None:
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(state))
        number = self._number() | 1
        self._changes[:] = number.to_bytes(8, "little")
        os.replace(temporary, self.path)
        self._changes[:] = (number + 1).to_bytes(8, "little")

    def _number(self) -> int:
        return int.from_bytes(self._changes[:], "little")

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _shared_number(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < 8:
            os.ftruncate(descriptor, 8)
        return mmap.mmap(descriptor, 8)
    finally:
        os.close(descriptor)


def new_node(product: str, count: int) -> State:
    """A node as it comes from the factory: MIG off, every GPU an NVLink peer of every other."""
    seed = secrets.token_hex(8)
    return {
        "product": product,
        "seed": seed,
        "boot": 1,
        "made": 0,
        "needs_root": False,
        "faults": [],
        "kernel_log": [],
        "gpus": [_new_gpu(index, count, seed) for index in range(count)],
    }


def next_uuid(state: State) -> str:
    """Of a MIG device. The same place gets another one each time."""
    state["made"] += 1
    place = f"{state['seed']}/{state['made']}"
    return f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, place)}"


def _new_gpu(index: int, count: int, seed: str) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{seed}/gpu/{index}')}",
        "bus": 7 + 8 * index,
        "mig": False,
        "mig_pending": False,
        "instances": [],
        "processes": [],
        "peers": [other for other in range(count) if other != index],
        "hidden_clients": 0,
        "leaves_remnants": 0,
        "drm_holds": False,
        "ecc_uncorrected": 0,
        "remap_pending": False,
        "remap_failed": False,
        "retire_pending": False,
        "fabric_state": 3,
        "throttle": 0,
        "recovery_action": 0,
        "lost": False,
        "profile_overrides": {},
    }
