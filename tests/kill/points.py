"""Kill points: where a process that acts on the world can be killed, found while it runs.

Between two of its acts a process changes nothing that outlives it, so killing it before and after each act
covers every instruction in between. Acts are discovered, not listed for each stage: whatever reaches one of
the functions wrapped here counts.

| kind | where | points |
|---|---|---|
| commit | psycopg: a transaction that wrote; a writing statement in autocommit | before, after |
| spawn | subprocess (asyncio's too), posix_spawn | before, after |
| rename, replace, renameat2, link, symlink, unlink, rmdir, truncate | os, ctypes | before, after |
| signal | os, signal | before, after |
| create, mkdir | open and os.open when they make or empty a file | after: the file is there and empty |
| fsync | os | before: the content is written; SIGKILL leaves what is in the page cache |
| driver | every function of pynvml | before, and after unless it only reads |

Must be imported before what it wraps is imported by name. Standard library only at import: it also runs
in the interpreters of the other environments, as `python points.py -m MODULE ARGUMENTS` instead of
`python -m MODULE ARGUMENTS`.
"""

import builtins
import ctypes
import functools
import io
import json
import os
import posix
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

VARIABLE = "QWEN_PIPELINE_TEST_KILL"
"""Carries `Orders` to Python children, as JSON; the prefix is what `processes.environment` passes on."""

_REPOSITORY = str(Path(__file__).resolve().parents[2]) + os.sep
_NOT_NAMED = ("tests/kill/points.py", "tests/kill/stage_server.py", "tasks/ledger/connection.py")
_READING = ("Get", "Is", "ErrorString", "Query", "Validate", "Wait")
"""Words in the names of NVML functions that change nothing."""

_AROUND = {
    os: (
        *("rename", "replace", "link", "symlink", "unlink", "remove", "rmdir", "truncate", "ftruncate"),
        *("kill", "killpg", "posix_spawn", "posix_spawnp"),
    ),
    signal: ("pidfd_send_signal",),
}
_KINDS = {
    "remove": "unlink",
    "ftruncate": "truncate",
    "kill": "signal",
    "killpg": "signal",
    "pidfd_send_signal": "signal",
    "posix_spawn": "spawn",
    "posix_spawnp": "spawn",
}

_local = threading.local()
_counting = threading.Lock()
_orders: "Orders | None" = None
_passed = 0


class Orders:
    """What a process and its Python children do at their points."""

    def __init__(
        self,
        trace: str,
        kill_at: int | None = None,
        in_child: str | None = None,
        also: Sequence[str] = (),
    ) -> None:
        """
        Args:
            trace: a file; each point passed is appended as one JSON line.
            kill_at: the number of the point to die at, from 1; None: only count.
            in_child: count in this child (the module that it runs with -m) instead of in the process itself.
            also: further functions to die before and after, as `module:function`.
        """
        self.trace = trace
        self.kill_at = kill_at
        self.in_child = in_child
        self.also = tuple(also)

    def to_json(self) -> str:
        """For `VARIABLE`."""
        return json.dumps(vars(self))


def install() -> None:
    """Wrap everything; nothing is counted before `arm`."""
    for module, names in _AROUND.items():
        for name in names:
            _replace(module, name, _around(getattr(module, name), _KINDS.get(name, name)))
    _replace(os, "fsync", _around(os.fsync, "fsync", after=False))
    _replace(os, "fdatasync", _around(os.fdatasync, "fsync", after=False))
    _replace(os, "mkdir", _around(os.mkdir, "mkdir", before=False))
    _replace(os, "open", _creating(os.open, lambda flags: bool(flags & (os.O_CREAT | os.O_TRUNC))))
    opened = _creating(io.open, lambda mode: any(letter in str(mode) for letter in "wxa"))
    builtins.open = opened
    io.open = opened
    subprocess.Popen._execute_child = _spawning(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
    ctypes.CDLL.__getattr__ = _calling(ctypes.CDLL.__getattr__)  # type: ignore[method-assign]
    for name, wrap in (("psycopg", _wrap_psycopg), ("pynvml", _wrap_pynvml)):
        try:
            wrap(import_module(name))
        except ImportError:
            continue


def arm(orders: Orders) -> None:
    """From here on count, and die at the point that `orders` names."""
    global _orders, _passed
    for place in orders.also:
        module, _, name = place.partition(":")
        _replace(import_module(module), name, _around(getattr(import_module(module), name), name))
    _passed = 0
    _orders = orders


def note(orders: Orders, **what: Any) -> None:
    """Append one line to the trace."""
    line = json.dumps({"pid": os.getpid(), **what}).encode() + b"\n"
    descriptor = posix.open(orders.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    posix.write(descriptor, line)
    posix.close(descriptor)


def _point(when: str, kind: str, detail: str) -> None:
    """Count; at the point that was ordered, die."""
    global _passed
    orders = _orders
    if orders is None or (orders.in_child is not None and orders.in_child != _role()):
        return
    with _counting:
        _passed += 1
        last = _passed == orders.kill_at
        note(orders, n=_passed, name=f"{when} {kind} at {_place()}", kind=kind, detail=detail, killed=last)
        if last:
            posix.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


def _role() -> str | None:
    """The module that this process runs, when it is a child of the one that was started for the test."""
    return globals().get("_module")


def _place() -> str:
    """The innermost line of this repository's code, and the functions that led there."""
    frame = sys._getframe(2)
    names: list[str] = []
    line = ""
    while frame is not None and len(names) < 3:
        code = frame.f_code
        file = code.co_filename.removeprefix(_REPOSITORY)
        if file.startswith(("tasks/", "tests/", "demo/")) and file not in _NOT_NAMED:
            line = line or f"{file}:{frame.f_lineno}"
            names.append(code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return f"{line} ({' < '.join(names)})" if names else "outside the repository"


def _around(
    function: Callable[..., Any], kind: str, *, before: bool = True, after: bool = True
) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        if _orders is None or getattr(_local, "inside", False) or _changes_nothing(kind, args):
            return function(*args, **options)
        _local.inside = True
        try:
            detail = _detail(args)
            if before:
                _point("before", kind, detail)
            result = function(*args, **options)
            if after:
                _point("after", kind, detail)
            return result
        finally:
            _local.inside = False

    return wrapped


def _creating(function: Callable[..., Any], makes: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        path = args[0] if args else options.get("file", options.get("path"))
        how = args[1] if len(args) > 1 else options.get("flags", options.get("mode", "r"))
        if _orders is None or not makes(how) or not isinstance(path, (str, bytes, os.PathLike)):
            return function(*args, **options)
        existed, had_content = os.path.lexists(path), _size(path) > 0
        result = function(*args, **options)
        if not existed or (had_content and _size(path) == 0):
            _point("after", "create", _detail((path,)))
        return result

    return wrapped


def _spawning(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, args: Any, executable: Any, preexec: Any, close: Any, fds: Any, cwd: Any, env: Any,
                *rest: Any) -> Any:  # fmt: skip
        if _orders is None:
            return function(self, args, executable, preexec, close, fds, cwd, env, *rest)
        words = [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else args
        _point("before", "spawn", str(words)[:300])
        if _orders.in_child is not None and isinstance(words, list):
            words, env = _followed(words, env)
        result = function(self, words, executable, preexec, close, fds, cwd, env, *rest)
        _point("after", "spawn", str(words)[:300])
        return result

    return wrapped


def _followed(words: list[Any], env: Mapping[str, str] | None) -> tuple[list[Any], Mapping[str, str] | None]:
    """The command with this file before the `-m` of a Python interpreter, so that the child counts too."""
    assert _orders is not None
    for index, word in enumerate(words[:-2]):
        if str(word).rpartition("/")[2].startswith("python") and words[index + 1] == "-m":
            followed = [*words[: index + 1], __file__, *words[index + 1 :]]
            return followed, {**(os.environ if env is None else env), VARIABLE: _orders.to_json()}
    return words, env


class _Counted:
    """A function of a C library that counts when it is called."""

    def __init__(self, function: Any, name: str) -> None:
        object.__setattr__(self, "_function", function)
        object.__setattr__(self, "_call", _around(function, name))

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._function, name, value)


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, name: str) -> Any:
        found = function(self, name)
        if name in ("renameat2", "renameat", "rename", "link"):
            found = _Counted(found, name)
            setattr(self, name, found)
        return found

    return wrapped


def _wrap_psycopg(psycopg: Any) -> None:
    base = import_module("psycopg._connection_base").BaseConnection
    command_of, execute_of = base._exec_command, psycopg.Cursor.execute

    def run_command(self: Any, command: Any, *args: Any, **options: Any) -> Generator[Any, Any, Any]:
        if _orders is None or command != b"COMMIT" or self.info.transaction_status.name != "INTRANS":
            return (yield from command_of(self, command, *args, **options))
        # A transaction that wrote nothing has no number, and its commit changes nothing.
        number = yield from command_of(self, b"select pg_current_xact_id_if_assigned()")
        wrote = number is None or number.get_value(0, 0) is not None
        if wrote:
            _point("before", "commit", "")
        result = yield from command_of(self, command, *args, **options)
        if wrote:
            _point("after", "commit", "")
        return result

    @functools.wraps(execute_of)
    def execute(self: Any, query: Any, *args: Any, **options: Any) -> Any:
        alone = self.connection.autocommit and self.connection.info.transaction_status.name == "IDLE"
        text = query.decode() if isinstance(query, bytes) else str(query)
        if not alone or text.strip().lower().startswith(("select", "show", "set ", "listen", "fetch")):
            return execute_of(self, query, *args, **options)
        return _around(execute_of, "commit")(self, query, *args, **options)

    base._exec_command = run_command
    psycopg.Cursor.execute = execute


def _wrap_pynvml(pynvml: Any) -> None:
    for name, function in list(vars(pynvml).items()):
        if name.startswith("nvml") and callable(function) and not isinstance(function, type):
            reads = any(word in name for word in _READING)
            setattr(pynvml, name, _around(function, f"driver call {name}", after=not reads))


def _replace(module: Any, name: str, wrapped: Any) -> None:
    original = getattr(module, name)
    setattr(module, name, wrapped)
    # shutil.rmtree asks these sets whether it may take the safe way.
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if original in known:
            known.add(wrapped)


def _changes_nothing(kind: str, args: tuple[Any, ...]) -> bool:
    """Signal 0 only asks whether a process is there; a file that has the length asked for stays as it is."""
    if kind == "signal":
        return len(args) > 1 and args[1] == 0
    return kind == "truncate" and len(args) > 1 and os.stat(args[0]).st_size == args[1]


def _detail(args: tuple[Any, ...]) -> str:
    shown = []
    for value in args[:2]:
        if isinstance(value, (str, os.PathLike)):
            shown.append(os.fspath(value))
        elif isinstance(value, int):
            shown.append(_path_of(value))
    return " -> ".join(str(word) for word in shown)[:400]


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return str(descriptor)


def _size(path: Any) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    _, _, _module, *_arguments = sys.argv
    sys.argv = [_module, *_arguments]
    install()
    arm(Orders(**json.loads(os.environ.pop(VARIABLE))))
    runpy.run_module(_module, run_name="__main__", alter_sys=True)
