"""The demo's long-lived child processes: started once, found and ended from any shell.

Whoever started a child may have been killed, so two things name it: a record in a folder of the demo, and the
marks in its environment (`tasks/node/processes.py`), which find it even when the kill came before the record.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from random import SystemRandom

from tasks.errors import StageFailed
from tasks.node import processes
from tasks.node.processes import DEPLOYMENT, PART, Process

SERVER_PORTS = (22000, 29999)
"""Above the pipeline's workers (`Settings.port_range`), below the ports that Linux gives to clients."""


class Children:
    """The children of one deployment; `folder` holds a record of each."""

    def __init__(self, folder: Path, deployment: str) -> None:
        self.folder = folder
        self.deployment = deployment
        self._mine: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        name: str,
        command: Sequence[str | os.PathLike[str]],
        *,
        environment: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
        ended_by: signal.Signals = signal.SIGTERM,
    ) -> Process:
        """Start `command` as `name`; a child of that name that lives is kept instead.

        `environment` is all that it gets, besides its marks. What it prints is appended to `log`. `ended_by`
        is the signal by which it ends in good order.
        """
        if (living := self.find(name)) is not None:
            return living
        marked = {**environment, DEPLOYMENT: self.deployment, PART: name}
        popen = processes.spawn(command, marked, log, outlives_parent=True, cwd=cwd)
        self._mine.append(popen)
        # One that ended at once is still there as a zombie of ours: its record then names a dead process.
        process = processes.identify(popen.pid) or Process(popen.pid, 0, "", "")
        record = {"process": asdict(process), "ended_by": ended_by}
        write_private(self._record(name), json.dumps(record))
        return process

    def find(self, name: str) -> Process | None:
        """The living main process of child `name`."""
        self._collect_the_dead()
        recorded = self._recorded(name)
        if recorded is None:
            marked = processes.find(name, self.deployment)
            # The main process is the oldest: it started the others.
            return min(marked, key=lambda found: found.start_ticks, default=None)
        process, _ = recorded
        return process if process.is_alive() else None

    def living(self, name: str | None = None) -> list[Process]:
        """All living processes of child `name`, or of the whole deployment, the caller left out."""
        self._collect_the_dead()
        names = [name] if name else [record.stem for record in self.folder.glob("*.json")]
        recorded = {process for known in names if (process := self.find(known)) is not None}
        return sorted(recorded | set(processes.find(name, self.deployment)))

    def run(
        self,
        name: str,
        command: Sequence[str | os.PathLike[str]],
        *,
        environment: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
    ) -> int:
        """Run `command` to its end; returns its exit status.

        What a killed demo left running under that name is ended first.
        """
        self.end(name)
        process = self.start(name, command, environment=environment, log=log, cwd=cwd)
        popen = next(popen for popen in self._mine if popen.pid == process.pid)
        return popen.wait()

    def end(self, *names: str, grace_s: float = 10.0) -> None:
        """End the children of those names, all at once, with all that they started.

        The signal that each was started with first, and SIGTERM; SIGKILL after `grace_s`.

        Raises:
            StageFailed: something of them lives on.
        """

        def living() -> list[Process]:
            return [process for name in names for process in self.living(name)]

        self._ask_to_end(names)
        refuse_survivors(processes.end_all(living, grace_s), ", ".join(names))
        for name in names:
            self._record(name).unlink(missing_ok=True)

    def end_all(self, *, grace_s: float = 10.0) -> None:
        """End every process of the deployment, recorded or not.

        Raises:
            StageFailed: something of it lives on.
        """
        self._ask_to_end([record.stem for record in self.folder.glob("*.json")])
        left = processes.end_all(self.living, grace_s)
        refuse_survivors(left, f"deployment {self.deployment}")
        for record in self.folder.glob("*.json"):
            record.unlink(missing_ok=True)

    def _ask_to_end(self, names: Iterable[str]) -> None:
        for name in names:
            recorded = self._recorded(name)
            if recorded is not None and recorded[1] != signal.SIGTERM:
                _send(*recorded)

    def _recorded(self, name: str) -> tuple[Process, signal.Signals] | None:
        try:
            record = json.loads(self._record(name).read_text())
            return Process(**record["process"]), signal.Signals(record["ended_by"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _collect_the_dead(self) -> None:
        self._mine = [popen for popen in self._mine if popen.poll() is None]

    def _record(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def refuse_survivors(survivors: Sequence[Process], what: str) -> None:
    """Raises:
    StageFailed: there are survivors.
    """
    if survivors:
        pids = ", ".join(str(process.pid) for process in survivors)
        raise StageFailed(
            f"{what} cannot be ended: process {pids} lives on after SIGKILL, so it waits in the kernel "
            f"(/proc/PID/stack says for what); end it, then run the same command again"
        )


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all, readable by the owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def kept_port(path: Path, *, another: bool = False) -> int:
    """A free port of 127.0.0.1: the one in `path`, so that it stays the same; else another, kept there.

    Somebody else can take it before the server does: a server that says so is started again with `another`.
    """
    with suppress(OSError, ValueError):
        port = int(path.read_text())
        if not another and _is_free(port):
            return port
    random = SystemRandom()
    while not _is_free(port := random.randint(*SERVER_PORTS)):
        pass
    write_private(path, str(port))
    return port


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])
    except OSError:
        return "(no log)"


def _send(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            # The handle pins the process; asked only now, the answer is about the one that it pins.
            if process.is_alive():
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: old connections in TIME_WAIT do not count, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
