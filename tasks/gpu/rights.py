"""Whether this process may change GPUs, asked before the first change."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tasks.gpu import nvml
from tasks.gpu.layouts import Step
from tasks.settings import Settings

HOW_TO_GET_THEM = (
    "let QWEN_PIPELINE_MIG_COMMAND name the privileged helper (docs/dgx.md has its sudoers line), or run this "
    "as root"
)

_CAP_SYS_ADMIN = 21
_CAPABILITY = Path("/proc/driver/nvidia/capabilities/mig/config")


def missing(settings: Settings, steps: Sequence[Step]) -> str:
    """What this process may not do of `steps`, and how to get the right; empty when it may do all."""
    if not steps:
        return ""
    library = nvml.simulation(settings)
    if library is not None:
        if library.may_change():
            return ""
        return f"this process may not change the layout of this (simulated) node: {HOW_TO_GET_THEM}"
    if any(step.do == "mode" for step in steps) and not _has_sys_admin():
        return f"switching MIG mode needs the capability CAP_SYS_ADMIN, which this process lacks: {HOW_TO_GET_THEM}"
    if any(step.do != "mode" for step in steps) and not _may_configure():
        return f"creating and destroying GPU instances needs {_CAPABILITY}, or root: {HOW_TO_GET_THEM}"
    return ""


def _has_sys_admin() -> bool:
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> _CAP_SYS_ADMIN & 1)


def _may_configure() -> bool:
    """Root, or whoever may read the device file of the capability (delegated with nvidia-modprobe)."""
    if os.geteuid() == 0:
        return True
    try:
        minor = re.search(r"DeviceFileMinor:\s*(\d+)", _CAPABILITY.read_text())
    except OSError:
        return False
    return minor is not None and os.access(f"/dev/nvidia-caps/nvidia-cap{minor[1]}", os.R_OK)
