"""Planning and applying a layout of 8 GPUs x 7 instances, on the simulated driver.

    .venv/bin/python -m benchmarks.mig_layout [ROUNDS]

What is measured is this project's side: Python's work and the number of calls, not how long a real driver takes. The
least number of changing calls is 2 for each instance (GPU instance and compute instance); of reading calls it is
one for each fact: what each profile and its places are, which instances there are, and what each is. Aim: planned
(world read, GPUs chosen, places found) in 50 ms.
"""

import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tasks.gpu import change, demand, inventory, nvml
from tasks.gpu.layouts import Step
from tasks.gpu.provision import ask
from tasks.gpu.simulated import control
from tasks.settings import Settings
from tasks.spec import MigLayout

LAYOUT = MigLayout(mig={"1g.10gb": 7})
GPUS = 8
INSTANCES = 7 * GPUS

_PROFILES = 7
_ENUMS = 18
"""NVML is asked for each kind of profile whether it exists."""
LEAST_READS_EMPTY = GPUS * (_ENUMS + 2 * _PROFILES)
"""Each kind of profile, and of those that exist the places and the instances."""
LEAST_CHANGES = 2 * INSTANCES


def measure(rounds: int) -> dict[str, float | int | bool | str]:
    """Medians over `rounds`, in ms, and calls of the driver."""
    logging.disable(logging.WARNING)
    planned, replanned, applied = [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(home=Path(folder), nvml="sim:a100-80", nvml_state=Path(folder) / "node")
            library = nvml.simulation(settings)
            assert library is not None, "it is simulated"
            control.set_mode(library.file, True)
            inventory.read(settings)  # imports, and what is read once
            library.calls.clear()
            began = time.perf_counter()
            steps = _plan(settings)
            planned.append(time.perf_counter() - began)
            plan_calls = library.calls.total()
            assert len(steps) == INSTANCES, "nothing is there yet"
            library.calls.clear()
            began = time.perf_counter()
            report = change.carry_out(steps, settings)
            applied.append(time.perf_counter() - began)
            assert report.error == "", report.error
            apply_calls = library.calls.total()
            changes = sum(count for name, count in library.calls.items() if "Create" in name)
            library.calls.clear()
            began = time.perf_counter()
            assert _plan(settings) == [], "everything is there"
            replanned.append(time.perf_counter() - began)
            replan_calls = library.calls.total()
    logging.disable(logging.NOTSET)
    return {
        "simulated": True,
        "layout": f"{GPUS} GPUs x 7 x 1g.10gb",
        "rounds": rounds,
        "plan_empty_ms": _ms(planned),
        "plan_empty_calls": plan_calls,
        "plan_empty_calls_about_mig_at_least": LEAST_READS_EMPTY,
        "plan_full_ms": _ms(replanned),
        "plan_full_calls": replan_calls,
        "apply_ms": _ms(applied),
        "apply_calls": apply_calls,
        "changing_calls": changes,
        "changing_calls_at_least": LEAST_CHANGES,
    }


def _plan(settings: Settings) -> list[Step]:
    there = inventory.read(settings)
    taken = demand.pick(ask(LAYOUT, there, None), there)
    return [step for one in taken for step in one.difference.steps()]


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1000, 1)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5)))
