"""What can go wrong, and who can help.

Every error that leaves a stage is a `StageError`. Its class says who can help (`remedy`) and with which exit
status the command line ends; its message holds what happened, why, and what to do about it. Anything else
that escapes is a defect of this project and keeps its traceback.
"""

from enum import Enum


class Remedy(Enum):
    """Who can make the next try succeed."""

    USER = "user"
    """The spec or the input must change; a retry alone repeats the failure."""
    RETRY = "retry"
    """A later try of the same thing can succeed without anybody's help."""
    OPERATOR = "operator"
    """Somebody with access to the node or the deployment must act first."""


class StageError(Exception):
    """A failure with a message for the person who reads it."""

    remedy: Remedy = Remedy.OPERATOR
    exit_status: int = 4


class InputError(StageError):
    """The spec or the input is wrong; the message names the field and what would be right."""

    remedy = Remedy.USER
    exit_status = 2


class Busy(StageError):
    """Somebody else holds what this stage needs; the message names the holder. A later try can help."""

    remedy = Remedy.RETRY
    exit_status = 3


class Fenced(StageError):
    """A newer claim exists: this process is an old holder and must end without another write.

    Nothing is lost by that: whoever claimed after it does the work.
    """

    remedy = Remedy.RETRY
    exit_status = 4


class Unavailable(StageError):
    """Something outside (database, hub, engine) did not answer; a later try can help."""

    remedy = Remedy.RETRY
    exit_status = 4


class StageFailed(StageError):
    """The world is not as the stage promised, and neither a retry nor the user alone can mend it."""

    remedy = Remedy.OPERATOR
    exit_status = 4


def of_name(name: str, message: str) -> StageError:
    """The error of this family that another process told of by its name; `StageFailed` where there is none."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, StageError):
        return kind(message)
    return StageFailed(message)
