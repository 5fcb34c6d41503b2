"""Who holds a GPU that NVML lists no process for: kernel modules, and daemons that keep it open.

Reports of it: nvidia_drm (mig-parted #181), DCGM (DCGM #276). There is nothing to retry against; a person stops
them.
"""

import os
from pathlib import Path

from tasks.gpu import nvml
from tasks.settings import Settings

_MODULES = ("nvidia_drm", "nvidia_modeset")
_USUAL = "nvsm, nvidia-dcgm, dcgm-exporter, and before a reset nvidia-persistenced"


def describe(settings: Settings, gpu_uuid: str) -> str:
    """Who it is, as far as it can be seen, and what to stop."""
    found = _simulated(settings, gpu_uuid) if nvml.is_simulated(settings) else [*_modules(), *_daemons()]
    if found:
        return f"held by {', '.join(found)}: stop that, and try again"
    return f"nothing that holds it is visible to this user: stop {_USUAL}, and try again"


def _modules() -> list[str]:
    try:
        lines = Path("/proc/modules").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [f"kernel module {each[0]}" for each in fields if each[0] in _MODULES and int(each[2]) > 0]


def _daemons() -> list[str]:
    """Processes that have a device file of NVIDIA's open; other users' are visible to root only."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            targets = [os.readlink(one.path) for one in os.scandir(f"{entry.path}/fd")]
            if any(target.startswith("/dev/nvidia") for target in targets):
                found.append(f"{Path(entry.path, 'comm').read_text().strip()} (pid {entry.name})")
        except OSError:
            continue
    return found


def _simulated(settings: Settings, gpu_uuid: str) -> list[str]:
    library = nvml.simulation(settings)
    assert library is not None, "asked for a simulated node only"
    gpu = next(each for each in library.file.read()["gpus"] if each["uuid"] == gpu_uuid)
    return [
        *(["kernel module nvidia_drm"] if gpu["drm_holds"] else []),
        *(["nv-hostengine (DCGM)"] if gpu["hidden_clients"] else []),
    ]
