"""Many steps one after the other, each a process of its own with a time limit; a step that fails stops nothing.

The file is read again before each step, so that a plan can be changed while it is carried out. A line is a
time limit in seconds and a step's words; `end` ends it, and without that it waits for further lines. Lines
that begin with `+` run beside what follows.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.kit import Kit, Stopwatch

_WAIT_S = 1.0


def carry_out(kit: Kit, plan: Path, gpu: int = 0, cores: str | None = None) -> None:
    """Carry out the lines of `plan` in order.

    Args:
        gpu: that its steps work on; another plan may have another one of the machine at the same time.
        cores: that its steps and all they start run on, as `0-15`.
    """
    (kit / "logs").mkdir(parents=True, exist_ok=True)
    if cores is not None:
        first, last = map(int, cores.split("-"))
        os.sched_setaffinity(0, range(first, last + 1))
    os.environ |= {
        "QWEN_BENCH_GPU": str(gpu),
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    log = kit / f"logs/{plan.stem}.log"
    done = 0
    watch = Stopwatch()
    while True:
        lines = [line.strip() for line in plan.read_text().splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if done >= len(lines):
            time.sleep(_WAIT_S)
            continue
        line = lines[done]
        done += 1
        if line == "end":
            _note(log, f"{watch.total_s():8.1f} end")
            return
        beside = line.startswith("+")
        limit_s, *words = shlex.split(line.removeprefix("+"))
        _note(log, f"{watch.total_s():8.1f} {'beside' if beside else 'begin '} {' '.join(words)}")
        process = _start(kit, f"{plan.stem}-{done:02d}", words)
        if beside:
            continue
        try:
            status: int | str = process.wait(float(limit_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "over its time"
        _note(log, f"{watch.total_s():8.1f} ended  {' '.join(words)}: {status}")


def _start(kit: Kit, name: str, words: list[str]) -> "subprocess.Popen[bytes]":
    environment = "serving" if words[0] == "offline" else "convert" if words[0] == "checkpoint" else "project"
    log = kit / f"logs/{name}-{words[0]}.log"
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(kit.python(environment)), "-m", "benchmarks.gpu", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "QWEN_BENCH_KIT": str(kit.home)},
            cwd="/",
        )


def _note(path: Path, line: str) -> None:
    with path.open("a") as log:
        log.write(line + "\n")
    print(line, file=sys.stderr, flush=True)
