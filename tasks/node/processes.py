"""Child processes that leave nothing unknown behind.

Each child gets an environment made from a list, never the parent's whole one: a worker started from an Airflow
task would otherwise carry Airflow's database password. Two entries say whose it is (`DEPLOYMENT`) and what it
is (`PART`), so "nothing is left" is a scan of /proc and not a guess. A process is named by pid, start time and
boot: a pid alone is another process after a while.
"""

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tasks import settings

DEPLOYMENT = "QWEN_PIPELINE_DEPLOYMENT"
PART = "QWEN_PIPELINE_PART"

_PASSED_ON = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "JAVA_HOME"),
    *("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"),
)
"""Of the parent's environment; OpenBLAS's two name the processor where it would guess wrong."""

_ALWAYS = {"LANG": "C.UTF-8", "PYDANTIC_DISABLE_PLUGINS": "__all__"}
"""Pydantic looks for plugins in the metadata of every installed package, an eighth of what importing a stage takes."""

_KILL_WAIT_S = 10.0
"""For the kernel to take a killed process away; its memory may have to be given back first."""

_SECRET = ("QWEN_PIPELINE_LEDGER_URL",)
"""Settings that hold a secret themselves stay with the process that was given them."""


@dataclass(frozen=True, order=True)
class Process:
    """One process, for ever: pid, start time in clock ticks after boot, boot id, host."""

    pid: int
    start_ticks: int
    boot_id: str
    host: str

    def is_alive(self) -> bool:
        """Whether it runs on this host now; a zombie does not, unless threads of it still do."""
        return self.is_local() and _stat(self.pid) == (self.start_ticks, True)

    def is_stopped(self) -> bool:
        """Whether it lives and a signal or a tracer holds it (state T)."""
        return self.is_alive() and _state(self.pid) in ("T", "t")

    def is_local(self) -> bool:
        """Whether its pid means anything here and now."""
        return self.host == host() and self.boot_id == boot_id()


def this_process() -> Process:
    """The calling process."""
    found = identify(os.getpid())
    assert found is not None, "the calling process is alive"
    return found


def identify(pid: int) -> Process | None:
    """The process that has `pid` now, or None."""
    ticks, alive = _stat(pid)
    return Process(pid, ticks, boot_id(), host()) if alive else None


def environment(part: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: the names passed on, the pipeline's settings without secrets, and who it is.

    Args:
        part: what the child is, as `RUN/STAGE` or `RUN/worker-0`.
        extra: what this child needs besides; wins over everything else.
    """
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    own = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("QWEN_PIPELINE_") and name not in _SECRET
    }
    marks = {DEPLOYMENT: settings.current().deployment, PART: part}
    return {**_ALWAYS, **passed, **own, **marks, **(extra or {})}


def spawn(
    command: Sequence[str | os.PathLike[str]],
    child_environment: Mapping[str, str],
    log: Path,
    *,
    outlives_parent: bool = False,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, with its output appended to `log`.

    Unless it outlives its parent, the kernel kills it when the thread that started it ends (PDEATHSIG), so
    start it from a thread that lives as long as it should.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    tied = [] if outlives_parent else ["setpriv", "--pdeathsig", "KILL", "--"]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*tied, *(os.fspath(word) for word in command)],
            env=dict(child_environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
        )


def find(part: str | None = None, deployment: str | None = None) -> list[Process]:
    """This deployment's processes on this host, by the marks in their environment; never the calling one.

    Args:
        part: only processes whose part is this, or begins with this and a slash.
        deployment: another deployment's instead of the current one's.
    """
    wanted = f"{DEPLOYMENT}={deployment or settings.current().deployment}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            marks = Path(entry.path, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in marks and _is_part(marks, part):
            process = identify(int(entry.name))
            if process is not None:
                found.append(process)
    return found


def session_of(leader: Process) -> list[Process]:
    """The living processes of the session that `leader` began, itself among them while it lives.

    The kernel gives out a pid anew only when no process, group and session has that number any more; so while
    members live, the number is theirs. When all are gone it may come back as another session: its leader then
    has another start time.
    """
    if not leader.is_local():
        return []
    now = identify(leader.pid)
    if now is not None and now != leader:
        return []
    members = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and _session(int(entry.name)) == leader.pid:
            process = identify(int(entry.name))
            if process is not None and process.start_ticks >= leader.start_ticks:
                members.append(process)
    return members


def part_of(process: Process) -> str | None:
    """The part in the process's environment; None when it is gone or has overwritten it."""
    try:
        marks = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{PART}=".encode()
    return next((mark.removeprefix(prefix).decode() for mark in marks if mark.startswith(prefix)), None)


def end(processes: Iterable[Process], grace_s: float) -> list[Process]:
    """SIGTERM, then SIGKILL after `grace_s`, each through a pidfd, so that no other process is ever hit.

    A stopped process (state T) hears no SIGTERM, so it gets no grace. Returns those that still live (a process in
    uninterruptible sleep), which is normally none. A process of another host or boot is not touched and not
    returned.
    """
    alive = [process for process in processes if process.is_alive() and process.pid != os.getpid()]
    deaf = [process for process in alive if grace_s <= 0 or process.is_stopped()]
    survivors = _signal_and_wait(deaf, signal.SIGKILL, _KILL_WAIT_S)
    hearing = [process for process in alive if process not in deaf]
    patient = _signal_and_wait(hearing, signal.SIGTERM, grace_s)
    return survivors + _signal_and_wait(patient, signal.SIGKILL, _KILL_WAIT_S)


def end_all(search: Callable[[], list[Process]], grace_s: float, rounds: int = 5) -> list[Process]:
    """`end` what `search` finds until it finds nothing: a process may fork while it is being ended."""
    for _ in range(rounds):
        found = search()
        if not found:
            return []
        end(found, grace_s)
        grace_s = 0.0
    return search()


@cache
def boot_id() -> str:
    """Names this boot of the kernel; pids and start times mean nothing in another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def host() -> str:
    """This host's name in the ledger."""
    return socket.gethostname()


def _is_part(marks: list[bytes], part: str | None) -> bool:
    if part is None:
        return True
    exact = f"{PART}={part}".encode()
    return any(mark == exact or mark.startswith(exact + b"/") for mark in marks)


def _signal_and_wait(processes: list[Process], number: signal.Signals, wait_s: float) -> list[Process]:
    open_fds: dict[int, Process] = {}
    poll = select.poll()
    try:
        for process in processes:
            try:
                fd = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            open_fds[fd] = process
            # Only now is the identity sure: the pidfd pins the process, so the pid cannot change its meaning.
            if not process.is_alive():
                os.close(fd)
                del open_fds[fd]
                continue
            poll.register(fd, select.POLLIN)
            with suppress(ProcessLookupError):  # it ended just now, and the poll will say so
                signal.pidfd_send_signal(fd, number)
        deadline = time.monotonic() + wait_s
        while open_fds and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                poll.unregister(fd)
                os.close(fd)
                del open_fds[fd]
        return [process for process in open_fds.values() if process.is_alive()]
    finally:
        for fd in open_fds:
            os.close(fd)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _session(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError, ValueError):
        return None


def _stat(pid: int) -> tuple[int, bool]:
    """(start time in ticks, whether it runs) from /proc/PID/stat, whose second field may hold spaces (proc(5)).

    A zombie that has other threads is a leader whose threads have not ended, perhaps because they hang in the kernel.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, False
    return int(fields[19]), fields[0] != "X" and (fields[0] != "Z" or int(fields[17]) > 1)
