"""One check: what was looked at, what was found, what is needed."""

from collections.abc import Callable
from dataclasses import dataclass

from tasks.errors import StageError


@dataclass(frozen=True)
class Check:
    """One line of preflight's report."""

    check: str
    """A field of the spec, or a part of the deployment."""
    found: str
    """What is there; for a failed check, what is wrong and what to do."""
    needed: str
    ok: bool

    def problem(self) -> str:
        """A failed check as one line for a person; names the field once."""
        return self.found if self.found.startswith(self.check) else f"{self.check}: {self.found}"


def look(check: str, needed: str, at: Callable[[], str]) -> Check:
    """The check whose finding is what `at` returns; it fails with the message of the error that `at` raises."""
    try:
        return Check(check, at(), needed, True)
    except StageError as error:
        return Check(check, str(error), needed, False)
