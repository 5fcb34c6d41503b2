"""Folders in which an attempt makes what it then moves into place.

Each is named by the claim under which it is made. So whoever comes next, of whichever run, knows the drafts
whose makers cannot act any more, and removes them; a stage that finds some is not satisfied.
"""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tasks.batch import segments
from tasks.ledger import Claim, Ledger
from tasks.ledger.claims import acting

_PREFIX = ".draft-"


def make(parent: Path, claim: Claim) -> Path:
    """An empty folder for what `claim` makes."""
    draft = parent / _name(claim.run_id, claim.epoch)
    draft.mkdir(parents=True)
    return draft


def abandoned(parent: Path, ledger: Ledger) -> list[Path]:
    """Drafts in `parent` of those who cannot act any more: killed, or fenced."""
    # The folder first: a draft that is made after this look is not judged by claims read before it.
    found = sorted(parent.glob(f"{_PREFIX}*"))
    if not found:
        return []
    of_the_living = {_name(one.run_id, one.epoch) for one in acting(ledger)}
    return [path for path in found if path.name not in of_the_living]


def remove(drafts: Iterable[Path]) -> None:
    """Delete them; one that somebody else deletes at the same time is no error."""
    for draft in drafts:
        shutil.rmtree(draft, ignore_errors=True)


def discard(draft: Path) -> None:
    """Remove a draft of which nothing is kept, and the folder around it if that was made for it alone."""
    remove([draft])
    with suppress(OSError):  # it holds something else
        draft.parent.rmdir()


def _name(run_id: str, epoch: int) -> str:
    return f"{_PREFIX}{segments.attempt_prefix(run_id, epoch).removesuffix('-')}"
