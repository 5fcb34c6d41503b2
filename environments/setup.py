"""`make setup`: makes the four environments, and the optional ones that are asked for, each exactly as its lock
says. `make lock` makes the locks.

Keeps:
- With nothing changed it changes nothing in any environment and takes well under a second, so that it may
  run while workers do: an environment carries a stamp of all that it was made from.
- The stamp is taken away first and written last. An environment without one was left half made, by a kill
  or a failure, and is made anew.
- One setup at a time. The lock is inherited by the tools it starts: when a setup is killed and its uv lives
  on, the next setup waits for that uv instead of working against it.
- No address of an index is written anywhere: uv looks where it, or pip, is told to look (see uv_tool.py).

Only the standard library is there when this runs.
"""

import argparse
import fcntl
import hashlib
import inspect
import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import machine
from uv_tool import ROOT, Failed, Uv, run_logged

HERE = ROOT / "environments"
ENVS = ROOT / ".envs"
TORCH = HERE / "torch.txt"


@dataclass(frozen=True)
class Environment:
    """One virtual environment: where it is, and what it is locked from."""

    name: str
    path: Path
    inputs: tuple[str, ...]
    """The requirement files in environments/, beside the base dependencies in pyproject.toml."""
    overrides: str | None = None
    torch: bool = False
    """With torch: pinned by version in a file of its own, because its CPU build has no hash that holds in
    every place it can come from."""
    local: str | None = None
    """A requirement file that names a package of this repository, installed beside `tasks`."""
    after: Callable[[Path, Path], None] | None = None
    """What else is made once the packages are there: gets the environment's path, and that of its log."""

    @property
    def lock(self) -> Path:
        return HERE / f"{self.name}.txt"

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.path / "setup-stamp"


def write_vllm_flags(environment: Path, log: Path) -> None:
    """Caches the options that the installed `vllm serve` knows, because asking it costs 13 CPU seconds.

    Writes vllm-flags.json: {"version": version, "flags": ["--additional-config", ...]}.

    Raises:
        Failed: there is no vLLM, or it does not start, or it shows its options in another way.
    """
    vllm = environment / "bin" / "vllm"
    installed = [found.name for found in environment.glob("lib/*/site-packages/vllm-*.dist-info")]
    if not (vllm.exists() and installed):
        raise Failed(
            f"there is no vLLM in {environment}: install its CUDA build there first (docs/deployment.md)"
        )
    shown = environment / "vllm-help.txt"
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    with shown.open("wb") as output:
        run_logged([str(vllm), "serve", "--help=all"], log, output=output, extra=quiet)
    text = shown.read_text(encoding="utf-8", errors="replace")
    shown.unlink()
    flags: set[str] = set()
    for line in text.splitlines():
        if re.match(r"  -", line):  # an option; its explanation is indented deeper, or 3 spaces further on
            flags.update(re.findall(r"(?:^|\s)(--[a-z0-9][a-z0-9_-]*)", line[2:].split("   ")[0]))
    if not {"--host", "--port", "--max-model-len"} <= flags:
        raise Failed(f"'vllm serve --help=all' does not show its options as expected; see {log}")
    version = installed[0].removeprefix("vllm-").removesuffix(".dist-info")
    content = json.dumps({"version": version, "flags": sorted(flags)}, indent=1) + "\n"
    (environment / "vllm-flags.json").write_text(content, encoding="utf-8")


# The slowest first: pyspark comes as source and is built, on one core.
ENVIRONMENTS = (
    Environment("spark", ENVS / "spark", ("spark.in",)),
    Environment(
        "serving",
        ENVS / "serving",
        ("serving.in",),
        overrides="serving.overrides",
        torch=True,
        local="vllm_cpu_compat.txt",
        after=write_vllm_flags,
    ),
    Environment("airflow", ROOT / ".venv", ("airflow.in", "test.in")),
    Environment("convert", ENVS / "convert", ("convert.in",), overrides="convert.overrides", torch=True),
)

OPTIONAL = (
    Environment("autoawq", ENVS / "autoawq", ("autoawq.in",), overrides="autoawq.overrides", torch=True),
)
"""Made when asked for by name; once there, kept as locked like the others."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=("setup", "check", "lock", "flags"), nargs="?", default="setup")
    parser.add_argument("--upgrade", action="store_true", help="lock: take the newest that is allowed")
    parser.add_argument(
        "--with",
        dest="wanted",
        action="append",
        default=[],
        choices=[environment.name for environment in OPTIONAL],
        help="setup: an optional environment as well",
    )
    parser.add_argument(
        "--python", type=Path, help="flags: the interpreter of an environment with a vLLM of your own"
    )
    arguments = parser.parse_args()
    if (arguments.verb == "flags") != (arguments.python is not None):
        parser.error("flags needs --python, and nothing else does")
    try:
        machine.check_python()
        if arguments.python:
            read_flags(arguments.python)
            return 0
        hold_lock()
        machine.bring_what_is_missing()
        uv = Uv.bring(ENVS / "uv", HERE / "uv.txt")
        if arguments.verb == "lock":
            lock_all(uv, arguments.upgrade)
        elif arguments.verb == "check":
            check_all(uv)
        else:
            set_up_all(uv, arguments.wanted)
    except Failed as failure:
        print(f"setup failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup stopped; the next 'make setup' goes on from here", file=sys.stderr)
        return 130
    return 0


def set_up_all(uv: Uv, wanted: Collection[str] = ()) -> None:
    """Makes what is not as its lock says, side by side; reports every failure, not only the first.

    Args:
        wanted: names of optional environments.
    """
    begin = time.monotonic()
    stale = not_current(uv, wanted)
    if not stale:
        print("setup: nothing to do, the environments are as their locks say")
        return
    print(f"setup: making {', '.join(environment.name for environment in stale)}", flush=True)
    failures = []
    with ThreadPoolExecutor(max_workers=len(stale)) as pool:
        pending = {pool.submit(make, environment, uv): environment for environment in stale}
        for done in as_completed(pending):
            environment, failure = pending[done], done.exception()
            if failure is None:
                seconds = time.monotonic() - begin
                print(f"setup: {environment.name} ready after {seconds:.0f} s", flush=True)
            elif isinstance(failure, Failed):
                failures.append(f"{environment.name}: {failure}")
            else:
                raise failure
    if failures:
        raise Failed("\n".join(failures))


def check_all(uv: Uv) -> None:
    """Makes nothing.

    Raises:
        Failed: an environment is not as its lock says.
    """
    if stale := not_current(uv):
        raise Failed(
            f"not as locked: {', '.join(environment.name for environment in stale)}; run 'make setup'"
        )


def read_flags(python: Path) -> None:
    """For an environment that was not made here, as one with vLLM's CUDA build."""
    log = ENVS / "logs" / "flags.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    environment = python.absolute().parent.parent
    write_vllm_flags(environment, log)
    print(f"flags: {environment / 'vllm-flags.json'} written")


def make(environment: Environment, uv: Uv) -> None:
    """Makes `environment` anew, or brings it up to its lock when it was whole and is still in its place."""
    log = ENVS / "logs" / f"{environment.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    whole = stamp_of(environment, uv)
    usable = environment.python.exists() and read_stamp(environment)[:1] == whole[:1]
    environment.stamp.unlink(missing_ok=True)
    if not usable:
        uv.run(["venv", "--clear", "--python", machine.interpreter(), str(environment.path)], log)
    files = [environment.lock, HERE / "self.txt"]
    if environment.torch:
        uv.install_torch(environment.python, TORCH, log)
        files.append(TORCH)
    if environment.local:
        files.append(HERE / environment.local)
    uv.run(["pip", "sync", "--python", str(environment.python), *map(str, files)], log)
    if environment.after:
        environment.after(environment.path, log)
    unfinished = environment.stamp.with_suffix(".new")
    unfinished.write_text("\n".join(whole) + "\n", encoding="utf-8")
    unfinished.replace(environment.stamp)


def not_current(uv: Uv, wanted: Collection[str] = ()) -> list[Environment]:
    expected = (*ENVIRONMENTS, *(e for e in OPTIONAL if e.name in wanted or e.path.exists()))
    return [e for e in expected if not e.python.exists() or read_stamp(e) != stamp_of(e, uv)]


def read_stamp(environment: Environment) -> list[str]:
    try:
        return environment.stamp.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def stamp_of(environment: Environment, uv: Uv) -> list[str]:
    """Two lines: where the environment is, and what is in it.

    A virtual environment holds absolute paths, so one that was moved is made anew. What is not in it does not
    count, lest a running worker loses its environment for nothing: neither which Python 3.11 runs the set-up
    (another shell may find another one), nor the settings of tools in pyproject.toml.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    installed = [project["build-system"], project["project"], project["tool"]["setuptools"]]
    content = hashlib.sha256(json.dumps(installed, sort_keys=True).encode())
    sources = [environment.lock, HERE / "self.txt", uv.requirements]
    if environment.torch:
        sources.append(TORCH)
    if environment.local:
        package = HERE / environment.local
        sources += [package, *sorted(p for p in package.with_suffix("").iterdir() if p.is_file())]
    if environment.after:
        content.update(inspect.getsource(environment.after).encode())
    for source in sources:
        content.update(source.name.encode() + b"\0" + hashlib.sha256(source.read_bytes()).digest())
    return [str(environment.path), content.hexdigest()]


def lock_all(uv: Uv, upgrade: bool) -> None:
    """Resolves every lock again. Without `upgrade` a version stays as long as it satisfies."""
    log = ENVS / "logs" / "lock.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    uv.compile(["environments/uv.in"], uv.requirements, upgrade, log)
    for environment in (*ENVIRONMENTS, *OPTIONAL):
        inputs = ["pyproject.toml", *(f"environments/{name}" for name in environment.inputs)]
        if environment.overrides:
            inputs += ["--override", f"environments/{environment.overrides}"]
        if environment.torch:
            inputs += ["--constraint", "environments/torch.txt", "--no-emit-package", "torch"]
        uv.compile(inputs, environment.lock, upgrade, log, torch=environment.torch)
        print(f"lock: {environment.lock.relative_to(ROOT)} written", flush=True)


def hold_lock() -> None:
    """Waits until no other setup, nor a tool that a killed one left, works on the environments.

    The lock is never closed: it goes with the last process that inherited it.
    """
    ENVS.mkdir(exist_ok=True)
    lock = os.open(ENVS / "setup.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("setup: another one is at work here; waiting until it has ended", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, True)


if __name__ == "__main__":
    sys.exit(main())
