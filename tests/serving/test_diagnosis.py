"""Why a worker ended, from its log. The lines are vLLM's and torch's own."""

import errno
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.errors import InputError, Remedy, StageFailed, Unavailable
from tasks.serving import diagnosis


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A worker's log."""
    return tmp_path / "worker-0.log"


def diagnose(log: Path, *lines: str, status: int = 1) -> diagnosis.Diagnosis:
    with log.open("a") as file:
        file.write("".join(f"(APIServer pid=7) {line}\n" for line in lines))
    return diagnosis.of_exit("worker-0", log, status)


@pytest.mark.parametrize(
    ("line", "kind", "remedy"),
    [
        ("OSError: [Errno 98] Address already in use", "address in use", Remedy.RETRY),
        ("vllm serve: error: unrecognized arguments: --nonsense 1", "bad flag", Remedy.USER),
        (
            "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.",
            "unsupported architecture",
            Remedy.USER,
        ),
        ("AssertionError: CPU GDN attention requires BF16.", "wrong dtype", Remedy.USER),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory", Remedy.USER),
        (
            "ValueError: No available memory for the cache blocks. Try increasing it.",
            "out of memory",
            Remedy.USER,
        ),
        (
            "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator",
            "out of memory",
            Remedy.USER,
        ),
        (
            "CUDA error: no kernel image is available for execution on the device",
            "no kernel",
            Remedy.OPERATOR,
        ),
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
            "driver too old",
            Remedy.OPERATOR,
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'model-00002-of-00002.safetensors'",
            "files missing",
            Remedy.OPERATOR,
        ),
        ("RuntimeError: something nobody has seen before", "unknown", Remedy.RETRY),
    ],
)
def test_a_failure_is_known_by_its_line(log: Path, line: str, kind: str, remedy: Remedy) -> None:
    found = diagnose(log, "INFO loading", line, "INFO shutting down")
    assert (found.kind, found.remedy) == (kind, remedy)
    assert line[:60] in found.message
    assert "INFO" not in found.message
    assert str(log) in found.message


def test_what_went_well_is_not_blamed(log: Path) -> None:
    mentions = "INFO 11-30 00:00:00 [utils.py:1] no preprocessor: FileNotFoundError, which is normal"
    assert diagnose(log, mentions, "Error: something new").kind == "unknown"


def test_the_engines_own_words_are_shown_not_those_that_point_to_them(log: Path) -> None:
    found = diagnose(
        log,
        "ERROR 11-30 00:00:00 [core.py:1] TypeError: unsupported operand for a frobnicator",
        *(f'ERROR   File "api_server.py", line {number}, in run' for number in range(9)),
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    )
    assert found.kind == "unknown"
    assert "unsupported operand for a frobnicator" in found.message
    assert "See root cause above" not in found.message


def test_a_killed_server_is_not_explained_by_what_its_log_says(log: Path) -> None:
    found = diagnose(log, "an old FileNotFoundError in passing", status=-signal.SIGKILL)
    assert (found.kind, found.remedy) == ("killed", Remedy.RETRY)
    assert "SIGKILL" in found.message


@pytest.mark.parametrize("status", [-signal.SIGKILL, 1])
def test_a_worker_that_ends_while_the_kernel_kills_for_want_of_memory_says_so(log: Path, status: int) -> None:
    log.write_text("EngineDeadError: the engine has died")
    found = diagnosis.of_exit("worker-0", log, status, kernel_killed=2)
    assert (found.kind, found.remedy) == ("host out of memory", Remedy.RETRY)
    assert "the kernel killed 2 process(es)" in found.message


def test_what_a_log_says_clearly_is_not_put_down_to_somebody_elses_want_of_memory(log: Path) -> None:
    log.write_text("vllm serve: error: unrecognized arguments: --frobnicate")
    assert diagnosis.of_exit("worker-0", log, 2, kernel_killed=1).kind == "bad flag"


def test_a_log_that_could_not_be_written_is_not_taken_for_a_quiet_one(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(total=10**9, used=10**9, free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    found = diagnosis.of_exit("worker-0", log, 1)
    assert (found.kind, found.remedy) == ("disk full", Remedy.RETRY)
    assert "the disk of its log has no room left" in found.message


def test_a_node_that_is_short_of_something_for_a_while_is_tried_again() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/logs/worker-0.log")
    nothing = OSError(errno.ENOENT, "No such file or directory", "setpriv")
    assert diagnosis.not_started("worker-0", full).remedy is Remedy.RETRY
    assert "No space left on device: '/logs/worker-0.log'" in diagnosis.not_started("worker-0", full).message
    assert diagnosis.not_started("worker-0", nothing).remedy is Remedy.OPERATOR


def test_a_server_that_cannot_run_here_is_not_tried_again(log: Path) -> None:
    found = diagnose(log, "Fatal Python error: Illegal instruction", status=-signal.SIGILL)
    assert (found.kind, found.remedy) == ("no kernel", Remedy.OPERATOR)


def test_what_several_processes_say_is_said_once(log: Path) -> None:
    log.write_text(
        "(Worker pid=20084) ERROR 11-30 04:37:40 [multiproc_executor.py:1063] ValueError: a new kind of trouble\n"
        "(EngineCore pid=19658) ERROR 11-30 04:37:41 [core.py:1510] ValueError: a new kind of trouble\n"
        "(APIServer pid=19000) ValueError: a new kind of trouble\n"
    )
    found = diagnosis.of_exit("worker-0", log, 1)
    assert found.message.count("a new kind of trouble") == 1


def test_a_message_stays_short_however_long_the_log(log: Path) -> None:
    found = diagnose(log, *(f"ERROR {number} " + "x" * 5000 for number in range(500)))
    assert len(found.message) < 3000
    assert "ERROR 499" in found.message


@pytest.mark.parametrize(
    ("remedy", "error"),
    [(Remedy.USER, InputError), (Remedy.RETRY, Unavailable), (Remedy.OPERATOR, StageFailed)],
)
def test_who_can_help_decides_the_exit_status(remedy: Remedy, error: type[Exception]) -> None:
    assert type(diagnosis.Diagnosis("any", remedy, "message").as_error()) is error
