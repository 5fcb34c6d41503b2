"""The helper that changes GPUs as root, for a stage that runs as nobody special: `python -I -m tasks.gpu.privileged`.

Reads one line of JSON {"steps": [...]} from standard input, validates it against its own view of the devices,
carries it out, or nothing of it, and prints the report as JSON. It creates, destroys and switches MIG mode, and
nothing else: no path, command or setting comes from its caller (sudo clears the environment). docs/dgx.md has the
sudoers line.

Keeps: a helper does not outlive its caller by more than a step. No signal reaches it, and no claim binds it; but its
caller holds its standard input open, and the kernel closes that whatever kills the caller. So once somebody has had
the lock after the caller's death, nothing of what the caller wanted is done any more.
"""

import fcntl
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks import settings as deployment
from tasks.errors import StageError, StageFailed
from tasks.gpu import change
from tasks.gpu.change import Report
from tasks.gpu.instances import Placement
from tasks.gpu.layouts import Spot, Step
from tasks.settings import Settings

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20
_MOST_STEPS = 512
_HELPER_TIMEOUT_S = 300.0
_CALLED_OFF_S = 30.0
"""For the step that a helper is at when it is called off."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Spot(_Strict):
    profile_id: int = Field(ge=0, le=10_000)
    name: str = Field(max_length=64)
    start: int = Field(ge=0, le=64)
    size: int = Field(ge=1, le=64)
    compute: list[tuple[int, int]] | None = Field(max_length=16)


class _Step(_Strict):
    do: Literal["mode", "destroy", "create", "complete"]
    gpu_uuid: str = Field(pattern=r"^GPU-[0-9a-f-]{36}$")
    spot: _Spot | None = None
    on: bool = False

    def step(self) -> Step:
        if (self.spot is None) != (self.do == "mode"):
            raise ValueError("every step but `mode` has a spot")
        if self.spot is None:
            return Step(self.do, self.gpu_uuid, on=self.on)
        placement = Placement(self.spot.start, self.spot.size)
        compute = None if self.spot.compute is None else tuple(self.spot.compute)
        return Step(self.do, self.gpu_uuid, Spot(placement, self.spot.profile_id, self.spot.name, compute))


class _Request(_Strict):
    steps: list[_Step] = Field(max_length=_MOST_STEPS)


def carry_out(steps: Sequence[Step], settings: Settings) -> Report:
    """Do `steps`: in this process, or by the helper where the settings name one.

    Raises:
        Busy: somebody else changes GPUs of this node right now.
        StageFailed: the helper does not answer as it should.
    """
    if not settings.mig_command:
        return change.carry_out(steps, settings)
    request = json.dumps({"steps": [step.document() for step in steps]})
    shown = " ".join(settings.mig_command)
    ran = _ask(settings.mig_command, request, shown)
    try:
        answer = json.loads(ran.stdout)
        return Report(**{**answer, "left": tuple(answer["left"])})
    except (ValueError, TypeError, KeyError):
        said = (ran.stderr.strip() or ran.stdout.strip() or "nothing").splitlines()[-1]
        raise StageFailed(
            f"{shown} ended with status {ran.returncode} and said {said!r}: is the sudoers line of docs/dgx.md there?"
        ) from None


def _ask(command: Sequence[str], request: str, shown: str) -> "subprocess.CompletedProcess[str]":
    """The helper's answer; its standard input stays open until it has ended, or has taken too long."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as lifeline:
        try:
            # The pipe takes all of it at once, so a helper that reads nothing holds nobody up.
            fcntl.fcntl(lifeline, fcntl.F_SETPIPE_SZ, len(request) + 1)
            print(request, file=lifeline, flush=True)
            helper = subprocess.Popen(
                command, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise StageFailed(
                f"QWEN_PIPELINE_MIG_COMMAND ({shown}) cannot be started: {error.strerror}"
            ) from None
        finally:
            os.close(reading)
        try:
            said, log_lines = helper.communicate(timeout=_HELPER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("%s did not end in %.0f s: calling it off", shown, _HELPER_TIMEOUT_S)
            lifeline.close()
            said, log_lines = _last_answer(helper, shown)
    return subprocess.CompletedProcess(command, helper.returncode, said, log_lines)


def _last_answer(helper: "subprocess.Popen[str]", shown: str) -> tuple[str, str]:
    """Of a helper that was called off. It is not killed: it is root's, and may hold a GPU half changed."""
    try:
        return helper.communicate(timeout=_CALLED_OFF_S)
    except subprocess.TimeoutExpired:
        raise StageFailed(
            f"{shown} (pid {helper.pid}) did not end in {_HELPER_TIMEOUT_S:.0f} s and hangs in the driver since it was "
            f"called off: look at dmesg. Should that step end after all, it does no other"
        ) from None


def parse(text: str) -> list[Step]:
    """The steps of a request.

    Raises:
        ValueError: it is not as it must be.
    """
    return [each.step() for each in _Request.model_validate_json(text).steps]


def main() -> int:
    """One request; the exit status is 0 when there is a report, whatever it says."""
    logging.basicConfig(stream=sys.stderr, level="INFO", format="%(levelname)s %(name)s: %(message)s")
    text = sys.stdin.readline(_MOST_BYTES + 1)
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError("the request is too long")
        steps = parse(text)
    except (ValidationError, ValueError) as error:
        return _say(Report(f"the helper refuses the request: {error}", "failed"))
    try:
        return _say(change.carry_out(steps, deployment.current(), _caller_is_there))
    except StageError as error:
        return _say(Report(str(error), "busy" if error.exit_status == 3 else "failed"))


def _caller_is_there() -> bool:
    """Nothing follows the request, so what can be read is the end."""
    return not select.select([sys.stdin], [], [], 0)[0]


def _say(report: Report) -> int:
    document: dict[str, Any] = {**vars(report), "left": list(report.left)}
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
