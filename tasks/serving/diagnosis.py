"""Why a worker ended: read from its log, with the few lines that matter and who can help."""

import errno
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import InputError, Remedy, StageError, StageFailed, Unavailable
from tasks.serving import log_files

_TAIL_LINES = 3000
_LINES = 4
_LINE_LENGTH = 400


@dataclass(frozen=True)
class Diagnosis:
    """What was wrong with a worker."""

    kind: str
    remedy: Remedy
    """RETRY: another start may succeed. USER and OPERATOR: it will not."""
    message: str
    """What, why, what to do, and the log lines that say so."""

    def as_error(self) -> StageError:
        """The same as an error of the stage."""
        errors: dict[Remedy, type[StageError]] = {Remedy.USER: InputError, Remedy.RETRY: Unavailable}
        return errors.get(self.remedy, StageFailed)(self.message)


@dataclass(frozen=True)
class Known:
    """A failure that is known by its words."""

    kind: str
    pattern: re.Pattern[str]
    remedy: Remedy
    says: str


def _known(kind: str, pattern: str, remedy: Remedy, says: str) -> Known:
    return Known(kind, re.compile(pattern), remedy, says)


KNOWN = (
    _known(
        "address in use",
        r"[Aa]ddress already in use|EADDRINUSE",
        Remedy.RETRY,
        "a port of its block was taken by another program",
    ),
    _known(
        "not installed",
        r"No module named 'tasks|cannot import name 'Door'",
        Remedy.OPERATOR,
        "this project is not installed in the serving environment, and its part of the API server is missing: "
        "install it there without its dependencies (pip install --no-deps)",
    ),
    _known(
        "bad flag",
        r"unrecognized arguments|error: argument |invalid choice:|error: the following arguments|"
        r"No common block size",
        Remedy.USER,
        "vLLM refused a flag: correct serving.extra_args",
    ),
    _known(
        "unsupported architecture",
        r"[Mm]odel architectures .* (are|is) not supported|has no vLLM implementation|"
        r"does not recognize this architecture",
        Remedy.USER,
        "the installed vLLM cannot serve this architecture: choose another model.repo, or a newer vLLM",
    ),
    _known(
        "wrong dtype",
        r"CPU GDN attention requires BF16",
        Remedy.USER,
        "on a CPU vLLM computes this architecture's gated delta nets in bfloat16 alone: set serving.dtype to bfloat16 "
        "or auto",
    ),
    _known(
        "out of memory",
        r"out of memory|OutOfMemoryError|NVML_SUCCESS == r INTERNAL ASSERT|[Cc]annot allocate memory|"
        r"MemoryError|No available memory for the cache blocks|larger than the (maximum|available)|"
        r"is less than desired .* memory utilization|not enough memory|DefaultCPUAllocator",
        Remedy.USER,
        "the slot has too little memory: lower serving.max_model_len, max_num_seqs or kv_cache_memory_mb, or "
        "use a larger slot",
    ),
    _known(
        "no kernel",
        r"no kernel image is available|Illegal instruction|SIGILL|does not support .* compute capability",
        Remedy.OPERATOR,
        "the installed vLLM has no code for this processor or GPU",
    ),
    _known(
        "driver too old",
        r"driver version is insufficient|NVIDIA driver on your system is too old",
        Remedy.OPERATOR,
        "the driver is older than the CUDA that the installed torch needs",
    ),
    _known(
        "files missing",
        r"No such file or directory|FileNotFoundError|Cannot find any model weights|"
        r"not the path to a directory|is not a local folder|weights were not initialized|SafetensorError|"
        r"Incomplete metadata|LocalEntryNotFoundError|Repo id must be in the form",
        Remedy.OPERATOR,
        "a file of the release is missing or broken: run `convert` again, which repairs it",
    ),
)
"""In this order: a traceback of one failure often ends in the words of a later one."""

_PASSES = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
"""What a node may be short of for a while: disk, processes, memory, files."""

_LOOKS_BAD = re.compile(r"\b(ERROR|CRITICAL|\w*Error|\w*Exception|Traceback|error:|fatal|Killed)")

_CAUSE = re.compile(r"\b[A-Z]\w*(?:Error|Exception): (?!Engine core initialization failed)")
"""The line that ends a traceback; the API server's own only points to that of its engine."""

_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )*((ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] )?")
"""Of a line of vLLM's: who says it, and when."""

_HARMLESS = re.compile(r"\b(DEBUG|INFO|WARNING)\b \d\d-\d\d ")
"""vLLM's own lines that are no error: they mention files that it does without."""


def not_started(worker_id: str, error: OSError) -> Diagnosis:
    """For a server that could not even be spawned."""
    remedy = Remedy.RETRY if error.errno in _PASSES else Remedy.OPERATOR
    return Diagnosis("not started", remedy, f"{worker_id} cannot be started: {error}")


def of_exit(worker_id: str, log: Path, status: int, kernel_killed: int = 0) -> Diagnosis:
    """Why the worker's server ended, whose output is in `log`.

    Args:
        status: as subprocess reports it: negative for a signal.
        kernel_killed: how many processes the kernel has ended for want of memory while it lived.
    """
    if -status in (signal.SIGKILL, signal.SIGTERM):
        # The log of a healthy server that somebody killed says nothing about that, only about other things.
        name = signal.Signals(-status).name
        if kernel_killed and status == -signal.SIGKILL:
            return _for_want_of_memory(worker_id, kernel_killed, log)
        says = (
            f"{worker_id} was killed by {name} from outside: its keeper did not do that, and the kernel killed "
            f"nothing for want of memory"
        )
        return Diagnosis("killed", Remedy.RETRY, says)
    how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    why = of_log(worker_id, log, how)
    # A killed engine takes its server along, which does not know why.
    return (
        _for_want_of_memory(worker_id, kernel_killed, log) if kernel_killed and why.kind == "unknown" else why
    )


def _for_want_of_memory(worker_id: str, kernel_killed: int, log: Path) -> Diagnosis:
    says = (
        f"{worker_id} ended while the kernel killed {kernel_killed} process(es) of this host for want of memory: "
        f"lower serving.kv_cache_memory_mb or max_model_len, lay out fewer workers, or let fewer load at once (the "
        f"setting starts_at_once); its log is {log}"
    )
    return Diagnosis("host out of memory", Remedy.RETRY, says)


def of_log(worker_id: str, log: Path, how: str) -> Diagnosis:
    """Why the worker failed, by its output in `log`.

    Args:
        how: what was seen of it, as `was not ready after 600 s`.
    """
    lines = [line for line in log_files.tail(log, _TAIL_LINES) if line.strip()]
    bad = [line for line in lines if not _HARMLESS.search(line)]
    for known in KNOWN:
        said = [line for line in bad if known.pattern.search(line)]
        if said:
            return Diagnosis(
                known.kind, known.remedy, _message(worker_id, how, known.says, _different(said)[:_LINES], log)
            )
    if not log_files.has_room(log):
        says = "the disk of its log has no room left, so the log may not say why: free some, then start again"
        return Diagnosis("disk full", Remedy.RETRY, _message(worker_id, how, says, bad[-_LINES:], log))
    causes = [line for line in bad if _CAUSE.search(line)]
    said = causes or [line for line in bad if _LOOKS_BAD.search(line)] or lines
    return Diagnosis("unknown", Remedy.RETRY, _message(worker_id, how, "", _different(said)[-_LINES:], log))


def _different(lines: list[str]) -> list[str]:
    """Without those that say again what one before them has said: each process that fails passes it on."""
    kept: dict[str, str] = {}
    for line in lines:
        text = _PREFIX.sub("", line).strip()
        if not any(text in other for other in kept):
            kept[text] = line
    return list(kept.values())


def _message(worker_id: str, how: str, why: str, said: list[str], log: Path) -> str:
    head = f"{worker_id} {how}" + (f": {why}" if why else "")
    shown = "".join(f"\n    {line.strip()[:_LINE_LENGTH]}" for line in said)
    return f"{head}; its log is {log}" + (f" and says:{shown}" if shown else " and says nothing")
