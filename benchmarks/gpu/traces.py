"""What a pool could leave on the machine: compared with what was there before the first one."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.deployment import Deployment
from benchmarks.gpu.kit import memory_used_bytes
from tasks.node import processes
from tasks.serving import ports, shared_memory

_TOLERANCE_BYTES = 512 * 2**20
"""Of the GPU's memory: as the stage `stop` allows."""


@dataclass(frozen=True)
class Traces:
    """Of one deployment, at one moment."""

    processes: tuple[str, ...]
    """With the deployment's mark: what they are part of."""
    shared_memory: tuple[str, ...]
    """Files that no process has open."""
    temporary: tuple[str, ...]
    """Folders of workers."""
    listening: tuple[int, ...]
    """Ports of the pipeline's range."""
    memory_bytes: int | None

    @classmethod
    def now(cls, at: Deployment) -> "Traces":
        """As it is."""
        settings = at.settings
        first, last = settings.port_range
        return cls(
            tuple(sorted(processes.part_of(one) or str(one.pid) for one in processes.find())),
            tuple(sorted(set(_names(Path("/dev/shm"))) - _held())),
            _names(settings.home / "tmp"),
            tuple(ports.occupied(range(first, last + 1))),
            memory_used_bytes(),
        )

    def keep(self, at: Deployment) -> None:
        """Later moments are compared with this one."""
        _kept(at).write_text(json.dumps(asdict(self)))

    def since_begin(self, at: Deployment) -> dict[str, Any]:
        """What is there that was not there at the beginning; `nothing` says whether that is all."""
        began = json.loads(_kept(at).read_text())
        more: dict[str, Any] = {
            name: sorted(_more(now, began[name]))
            for name, now in asdict(self).items()
            if name != "memory_bytes"
        }
        grown = (self.memory_bytes or 0) - (began["memory_bytes"] or 0)
        nothing = not any(more.values()) and grown <= _TOLERANCE_BYTES
        return {**more, "memory_grown_bytes": grown, "nothing": nothing}


def _more(now: Iterable[Any], before: Iterable[Any]) -> set[Any]:
    return set(now) - set(before)


def _held() -> set[str]:
    everybody = [processes.identify(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return {Path(path).name for path in shared_memory.held_by(one for one in everybody if one is not None)}


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(os.listdir(folder))) if folder.is_dir() else ()


def _kept(at: Deployment) -> Path:
    return at.settings.home / "traces.json"
