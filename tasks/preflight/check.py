"""One check: what was looked at, what was found, what is needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.errors import StageError

_WIDEST = 44


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
    to_do: str = ""
    """What would be better, for a check that passed and whose finding costs speed or safety."""

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
        return {
            "check": self.check,
            "found": self.found,
            "needed": self.needed,
            "ok": self.ok,
            "to_do": self.to_do,
        }


@dataclass(frozen=True)
class Poor:
    """A finding that does not stop a run."""

    found: str
    to_do: str


def look(check: str, needed: str, at: Callable[[], str | Poor]) -> Check:
    """The check that finds what `at` returns; it fails with the message of the error that `at` raises."""
    try:
        found = at()
        if isinstance(found, Poor):
            return Check(check, found.found, needed, to_do=found.to_do)
        return Check(check, found, needed)
    except StageError as error:
        return Check(check, str(error), needed, type(error))


def table(documents: Sequence[Mapping[str, Any]]) -> str:
    """Checks for a person: what, found, needed, what to do."""
    rows = [("what", "found", "needed", "what to do")]
    rows += [(one["check"], one["found"], one["needed"], one.get("to_do") or "-") for one in documents]
    widths = [min(max(len(row[column]) for row in rows), _WIDEST) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]])
        for row in rows
    )
