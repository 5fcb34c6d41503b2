"""A tiny Qwen3 with random weights, made once for this checkout."""

import subprocess
from pathlib import Path

from tasks import settings as deployment
from tasks.node import lock

KEPT = deployment.REPOSITORY / "var" / "test-models"
"""Models, and what vLLM learns about model classes, which costs it 10 s of a core."""

_MAKE = Path(__file__).parent / "make_tiny_qwen3.py"


def tiny_qwen3() -> Path:
    """Its folder."""
    folder = KEPT / "tiny-qwen3"
    with lock.held(KEPT / "lock", "make the tiny Qwen3", wait_s=300):
        python = deployment.current().python_convert
        subprocess.run([python, _MAKE, folder], check=True, timeout=300)
    return folder
