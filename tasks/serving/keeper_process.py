"""How a keeper is started so that it outlives whoever starts it.

A session of its own is not enough where systemd is process 1: when it restarts the service of an Airflow
worker it ends everything in that service's cgroup, keepers and vLLM among it. There the keeper becomes a
transient unit in a slice of its own, with a maximum run time as one more end; and when such a keeper is
killed, systemd ends what it had started. Nothing secret is on a command line: the unit reads its environment
from a 0600 file that is removed once it has; the file is named after its writer, so that one whose writer was killed
is known and removed by the next start or reaping.
"""

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import StageFailed
from tasks.node import processes
from tasks.settings import Settings

log = logging.getLogger(__name__)

SLICE = "qwen_pipeline.slice"
"""With an underscore: a hyphen would make it a part of a slice `qwen`."""

_SYSTEMD_RUNS = Path("/run/systemd/system")
"""Exists exactly when systemd is the init of this machine (sd_booted(3))."""

_ANSWER_S = 30.0

_OF_WRITER = re.compile(r"(?P<host>.+)-(?P<pid>\d+)\.environment")


@dataclass(frozen=True)
class Started:
    """A keeper that is coming up."""

    ended: Callable[[], str | None]
    """How it ended, as `ended with exit status 4`; None while it may still come up."""


def start(
    pool_id: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log_file: Path,
    settings: Settings,
    longest_s: float,
) -> Started:
    """Start a keeper.

    Args:
        environment: the whole one of the keeper.
        longest_s: what the unit may run at most; ignored where there is no unit.

    Raises:
        StageFailed: units are asked for, and systemd makes none.
    """
    manager = _manager(settings)
    if manager is None:
        return _in_a_session(command, environment, log_file)
    unit = unit_name(pool_id, settings)
    try:
        return _in_a_unit(manager, unit, command, environment, log_file, settings, longest_s)
    except StageFailed as error:
        if settings.keeper_unit == "always":
            raise
        log.warning("%s; the keeper gets a session of its own instead", error)
        return _in_a_session(command, environment, log_file)


def unit_name(pool_id: str, settings: Settings) -> str:
    """Of the pool's unit: one host's deployments differ in it."""
    return f"{settings.deployment}-keeper-{re.sub(r'[^A-Za-z0-9_.]', '_', pool_id)}.service"


def remove_abandoned(settings: Settings) -> None:
    """Remove the environments whose writers were killed before they could: there is a secret in them."""
    # A disk that is read-only, or somebody else's file, keeps nobody from starting or reaping.
    with suppress(OSError):
        for file in (settings.home / "keepers").glob("*.environment"):
            named = _OF_WRITER.fullmatch(file.name)
            if named is None or (
                named["host"] == processes.host() and not Path("/proc", named["pid"]).exists()
            ):
                file.unlink(missing_ok=True)


def _manager(settings: Settings) -> list[str] | None:
    """How the systemd that takes keepers is addressed; None where keepers get a session.

    That is the system's for root, and for others their own, which lingers when the administrator says so
    (`loginctl enable-linger`).
    """
    own = ["--user"] if os.geteuid() else []
    if settings.keeper_unit == "auto":
        place = Path(f"/run/user/{os.geteuid()}/systemd/private") if own else _SYSTEMD_RUNS
        return own if place.exists() and shutil.which("systemd-run") else None
    return own if settings.keeper_unit == "always" else None


def _in_a_session(command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> Started:
    child = processes.spawn(command, environment, log_file, outlives_parent=True, cwd=Path("/"))

    def ended() -> str | None:
        status = child.poll()
        return None if status is None else f"ended with exit status {status}"

    return Started(ended)


def _in_a_unit(
    manager: Sequence[str],
    unit: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log_file: Path,
    settings: Settings,
    longest_s: float,
) -> Started:
    folder = settings.home / "keepers"
    folder.mkdir(parents=True, exist_ok=True)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(settings)
    environment_file = folder / f"{processes.host()}-{os.getpid()}.environment"
    try:
        _write_private(environment_file, "".join(_line(*entry) for entry in environment.items()))
        _ask(
            [
                "systemd-run",
                *manager,
                *("--unit", unit),
                *("--slice", SLICE),
                "--collect",
                "--quiet",
                "--service-type=exec",  # answers when the program runs, and so has read its environment
                *("--description", f"keeper of the vLLM workers of {unit}"),
                f"--property=EnvironmentFile={environment_file}",
                f"--property=RuntimeMaxSec={longest_s:.0f}",
                f"--property=TimeoutStopSec={settings.drain_s + 2 * settings.stop_grace_s:.0f}",
                f"--property=StandardOutput=append:{log_file}",
                f"--property=StandardError=append:{log_file}",
                "--property=OOMPolicy=continue",  # one worker that is killed for memory is replaced
                "--property=KillMode=mixed",  # the keeper is asked to end, and ends its workers in order
                "--",
                *command,
            ]
        )
    finally:
        with suppress(FileNotFoundError):
            environment_file.unlink()

    def ended() -> str | None:
        shown = _ask(["systemctl", *manager, "show", "--property=ActiveState,Result,ExecMainStatus", unit])
        state = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        if state.get("ActiveState") in ("active", "activating", "reloading"):
            return None
        return f"ended ({state.get('Result')}, exit status {state.get('ExecMainStatus')})"

    return Started(ended)


def _ask(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
            # Where a user's systemd listens; a service's environment seldom has it.
            env={"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}", **os.environ},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StageFailed(f"{command[0]} does not answer ({error})") from None
    if done.returncode:
        raise StageFailed(f"{command[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _write_private(path: Path, text: str) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _line(name: str, value: str) -> str:
    """As systemd.exec(5), EnvironmentFile, reads it."""
    escaped = "".join(f"\\{letter}" if letter in '\\"`$' else letter for letter in value)
    return f'{name}="{escaped}"\n'
