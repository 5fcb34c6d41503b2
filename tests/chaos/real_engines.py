"""The deployment of the cells with the real vLLM: on one CPU core, with a tiny Qwen3 of random weights."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from tests.batch.world import prompt_of
from tests.chaos.world import Batch, World
from tests.serving.real_model import KEPT, tiny_qwen3

CELLS = (
    ("start", "task killed -9"),
    ("start", "run marked failed"),
    ("start", "everything killed"),
    ("run", "task killed -9"),
    ("run", "task marked failed"),
    ("run", "run marked failed"),
    ("run", "run cleared"),
    ("run", "scheduler killed"),
    ("run", "everything killed"),
    ("run", "PostgreSQL killed"),
    ("run", "disk full"),
    ("stop", "task killed -9"),
)
"""Where the engine matters: while it starts, while it answers, while it is ended."""

_ASKED = re.compile(r"Request (\S+) details: prompt: .*?question (\S+) :")
_ANSWERED = re.compile(r"Generated response (\S+?): .*finish_reason")


class RealEngines(World):
    """See the module."""

    batch_rows = 300
    """So that something is in flight when it goes wrong."""

    def environment(self) -> dict[str, str]:
        """The deployment's settings."""
        stood_in = super().environment()
        del stood_in["QWEN_PIPELINE_WORKER_COMMAND"]
        # Requests and answers are logged whole, so that the engine itself says what it did twice.
        worker = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CACHE_ROOT": str(KEPT / "vllm-cache")}
        return {
            **stood_in,
            "QWEN_PIPELINE_WORKER_ENVIRONMENT": json.dumps(worker),
            "QWEN_PIPELINE_TRY_RELEASES": "false",
        }

    def spec(self, batch: Batch) -> dict[str, Any]:
        """The run spec of a cell."""
        spec = super().spec(batch)
        return {
            **spec,
            "serving": {
                "max_model_len": 256,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 256,
                "kv_cache_memory_mb": 32,
                "extra_args": {"enable-log-requests": True, "enable-log-outputs": True},
            },
        }

    def generated_twice(self, batch: Batch) -> int:
        """Answers that an engine gave for a prompt that it had answered before, by its own log."""
        mark = prompt_of(f"{batch.name}-").removeprefix("question ").partition(" :")[0]
        asked: dict[str, str] = {}
        answered: set[str] = set()
        for path in (self.disk / "pipeline" / "logs").rglob("worker-*.log*"):
            text = path.read_text(errors="replace")
            asked.update(_ASKED.findall(text))
            answered.update(_ANSWERED.findall(text))
        times = Counter(asked[name] for name in answered if name in asked)
        return sum(count - 1 for row_id, count in times.items() if row_id.startswith(mark))

    def write_model(self, folder: Path) -> None:
        """What the hub has."""
        shutil.copytree(tiny_qwen3(), folder)
