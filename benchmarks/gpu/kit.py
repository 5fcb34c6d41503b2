"""Where the kit keeps what it makes on the GPU machine, and how a result is written."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("vllm", "torch", "triton", "transformers", "llmcompressor", "compressed-tensors", "nvidia-ml-py")


class Kit:
    """The folder KIT: environments, models, logs and results."""

    def __init__(self, home: Path | None = None) -> None:
        """By default the folder that holds the running interpreter's environment, or $QWEN_BENCH_KIT."""
        named = os.environ.get("QWEN_BENCH_KIT")
        self.home = (home or (Path(named) if named else Path(sys.prefix).parent)).absolute()

    def __truediv__(self, name: str) -> Path:
        return self.home / name

    @property
    def mark(self) -> str:
        """Names this kit's processes; another kit on the same machine must not find them."""
        return f"bench-{sha256(str(self.home).encode()).hexdigest()[:8]}"

    def python(self, environment: str) -> Path:
        """The interpreter of one of the kit's environments."""
        return self.home / environment / "bin" / "python"

    def model(self, name: str) -> Path:
        """A checkpoint: `none` as made, `fp8` and `w4` converted from it."""
        return self.home / "models" / name

    def write(self, name: str, data: Mapping[str, Any]) -> Path:
        """Write a result with date, card and versions."""
        path = self.home / "results" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "benchmark": name,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "card": card(),
            "cores": len(os.sched_getaffinity(0)),
            "versions": self._versions(),
            **data,
        }
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(document, indent=1) + "\n")
        draft.rename(path)
        print(f"wrote {path}", file=sys.stderr)
        return path

    def _versions(self) -> dict[str, str]:
        found = {"python": ".".join(map(str, sys.version_info[:3]))}
        beside = [*sys.path, *(str(path) for path in self.home.glob("*/lib/python*/site-packages"))]
        for name in _PACKAGES:
            for package in metadata.distributions(name=name, path=beside):
                found[name] = package.version
                break
        return found


def gpu_index() -> int:
    """The GPU that this step works on: $QWEN_BENCH_GPU, by default the first."""
    return int(os.environ.get("QWEN_BENCH_GPU", "0"))


def gpu_suffix() -> str:
    """What names of this step's GPU end with; nothing for the first."""
    return f"-gpu{gpu_index()}" if gpu_index() else ""


def card() -> dict[str, Any] | None:
    """What the driver says of this step's GPU; None where there is none."""
    with nvml() as handle:
        if handle is None:
            return None
        import pynvml

        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "name": pynvml.nvmlDeviceGetName(handle),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "memory_total_bytes": memory.total,
            "memory_used_bytes": memory.used,
            "power_limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        }


def memory_used_bytes() -> int | None:
    """Of this step's GPU, by all processes."""
    with nvml() as handle:
        if handle is None:
            return None
        import pynvml

        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def processes_on_gpu() -> list[int]:
    """Pids that the driver names; empty in a container that hides them."""
    with nvml() as handle:
        if handle is None:
            return []
        import pynvml

        with suppress(pynvml.NVMLError):
            return [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        return []


@contextmanager
def nvml() -> Iterator[Any]:
    """A handle of this step's GPU for the block; None where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml.nvmlDeviceGetHandleByIndex(gpu_index())
    finally:
        pynvml.nvmlShutdown()


class Stopwatch:
    """Seconds since it was made, and laps."""

    def __init__(self) -> None:
        self._began = self._lap = time.monotonic()

    def total_s(self) -> float:
        """Since the beginning."""
        return round(time.monotonic() - self._began, 3)

    def lap_s(self) -> float:
        """Since the last lap."""
        now = time.monotonic()
        lap, self._lap = now - self._lap, now
        return round(lap, 3)
