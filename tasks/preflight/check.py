"""One check: what was looked at, what was found, what is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.errors import StageError


@dataclass(frozen=True)
class Check:
    """One line of preflight's report."""

    check: str
    """A field of the spec, or a part of the deployment."""
    found: str
    """What is there; for a failed check, what is wrong and what to do."""
    needed: str
    error: type[StageError] | None = None
    """Of a failed check: its class says who can help."""

    @property
    def ok(self) -> bool:
        """Whether it passed."""
        return self.error is None

    def problem(self) -> str:
        """A failed check as a line for a person. Messages about a field begin with its name."""
        begins_with_a_field = self.found.partition(":")[0].replace("_", "").replace(".", "").isalnum()
        return self.found if begins_with_a_field else f"{self.check}: {self.found}"

    def document(self) -> dict[str, Any]:
        """For `--json` and XCom."""
        return {"check": self.check, "found": self.found, "needed": self.needed, "ok": self.ok}


def look(check: str, needed: str, at: Callable[[], str]) -> Check:
    """The check that finds what `at` returns; it fails with the message of the error that `at` raises."""
    try:
        return Check(check, at(), needed)
    except StageError as error:
        return Check(check, str(error), needed, type(error))
