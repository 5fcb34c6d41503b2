"""A stage that only the harness's own tests know: right by default, wrong in one way if TOY_BUG says so.

In the folder `toy` it finds `kept`, which somebody else wrote and which must survive, and makes `answer`: a
child process writes a draft, which is synced and moved into place.
"""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.contract import Context, Outcome
from tasks.errors import StageFailed
from tasks.node import processes

TOY_BUG = "QWEN_PIPELINE_TEST_TOY_BUG"

MOVES_AWAY_FIRST = "moves_away_first"
"""Between two steps of a replacement the content of `kept` is nowhere."""
RECORDS_FIRST = "records_first"
"""Says that the answer is there, then puts it there; and the plan believes what was said."""
LEAVES_DRAFTS = "leaves_drafts"
"""Nobody clears what a killed attempt was writing."""
LEAVES_A_CHILD = "leaves_a_child"
"""A child that outlives the stage, under a name that no successor looks for."""
FAILS_ON_A_DRAFT = "fails_on_a_draft"
"""Takes the draft of a killed attempt for a rival at work."""

ANSWER = "42\n"


@dataclass(frozen=True)
class Plan:
    """Whether the answer must be made."""

    satisfied: bool
    reason: str


def plan(context: Context) -> Plan:
    """Looks at the files; a draft beside a good answer is a difference too, for who else would clear it?"""
    if _has(RECORDS_FIRST):
        return Plan(_said(context), "the ledger says whether the answer is there")
    folder = _folder(context)
    if not _is_answer(folder / "answer"):
        return Plan(False, "the answer is missing")
    if _drafts(folder):
        return Plan(False, "a killed attempt left its draft")
    return Plan(True, "the answer is there")


def apply(wanted: Plan, context: Context) -> None:
    """Make the answer."""
    folder = _folder(context)
    draft = _fresh_draft(folder)
    _write_in_a_child(context, draft / "answer")
    with (draft / "answer").open("rb") as file:
        os.fsync(file.fileno())
    if _has(RECORDS_FIRST):
        context.claim.progress(1, 1, "answers")
    if _has(MOVES_AWAY_FIRST):
        content = (folder / "kept").read_text() if (folder / "kept").exists() else "nothing was kept"
        (folder / "kept").unlink(missing_ok=True)
        (folder / "kept").write_text(content)
    os.replace(draft / "answer", folder / "answer")
    draft.rmdir()
    context.claim.progress(1, 1, "answers")


def verify(context: Context) -> Outcome:
    """Looks at the file again."""
    if not _has(RECORDS_FIRST) and not _is_answer(_folder(context) / "answer"):
        raise StageFailed("the answer is missing")
    return Outcome("the answer is there")


def _fresh_draft(folder: Path) -> Path:
    for left in _drafts(folder):
        if _has(FAILS_ON_A_DRAFT):
            raise StageFailed(f"somebody writes to {left.name}")
        shutil.rmtree(left)
    draft = folder / f"draft-{os.getpid()}"
    draft.mkdir()
    return draft


def _drafts(folder: Path) -> list[Path]:
    return [] if _has(LEAVES_DRAFTS) else sorted(folder.glob("draft-*"))


def _write_in_a_child(context: Context, target: Path) -> None:
    part = "a-stranger" if _has(LEAVES_A_CHILD) else context.part
    child = processes.spawn(
        ["sh", "-c", f"printf '42\\n' > {target}; exec sleep 60"],
        processes.environment(part),
        context.settings.logs / "toy.log",
        outlives_parent=_has(LEAVES_A_CHILD),
    )
    while not _is_answer(target):
        if child.poll() is not None:
            raise StageFailed("the child ended early")
        time.sleep(0.002)
    child.kill()
    child.wait()


def _said(context: Context) -> bool:
    with context.claim.ledger.transaction() as connection:
        return bool(connection.execute("select from progress where stage = 'toy' and done = 1").rowcount)


def _is_answer(path: Path) -> bool:
    return path.exists() and path.read_text() == ANSWER


def _folder(context: Context) -> Path:
    return context.settings.home / "toy"


def _has(bug: str) -> bool:
    return os.environ.get(TOY_BUG) == bug
