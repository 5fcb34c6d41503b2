"""How many workers of a pool may load at once."""

import os
from pathlib import Path

from tasks.serving.server import Job


def at_once(job: Job, workers: int) -> int:
    """How many workers may load at once: on a CPU they share the host's memory, on GPUs each has its own.

    A loading worker holds its weights twice (the file's pages and the tensors) beside Python and torch.
    """
    if job.settings.starts_at_once is not None:
        return job.settings.starts_at_once
    weights_bytes = sum(path.stat().st_size for path in job.release_path.glob("*.safetensors"))
    needed = 2 * weights_bytes + (job.serving.kv_cache_memory_mb or 0) * 2**20 + 1.5 * 2**30
    return max(1, min(workers, int(_available_bytes() // needed)))


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
