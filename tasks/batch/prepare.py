"""prepare: read the input once, all of it, before a device is taken.

Ids are unique and present, tokens are counted, and what is already answered is known: so `provision` and
`start` can tell that no row is left to do, and bad input costs no GPU. A large input is read by Spark, part by
part; a small one here, by the same code.

Memory: some hundred rows, all ids, and what `rows` holds for finished rows.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.batch import (
    drafts,
    ids,
    in_ledger,
    input,
    parts,
    prepare_driver,
    prepared,
    prepared_part,
    rows,
    submission,
    writing,
)
from tasks.batch.prepare_driver import Work
from tasks.contract import Context, Outcome
from tasks.errors import InputError, StageFailed, Unavailable
from tasks.ledger.claims import facts_of


@dataclass(frozen=True)
class Plan:
    """Which batch the spec means, and what is missing of it."""

    identity: dict[str, Any]
    folder: Path
    description: input.InputDescription
    missing: str | None
    """What of the prepared batch is to be written, for a person; None when it is all there."""
    is_known: bool
    """Whether the ledger has the batch."""
    unregistered_rows: int
    """Finished rows that a killed attempt left unregistered."""
    abandoned: list[Path]
    """Drafts of killed attempts."""

    @property
    def satisfied(self) -> bool:
        """Whether the batch is prepared, known, and killed attempts left nothing to take over or to remove."""
        return self.missing is None and self.is_known and not self.unregistered_rows and not self.abandoned

    @property
    def reason(self) -> str:
        """For a person."""
        if self.missing is not None:
            return f"the input is to be read: {self.missing}"
        if not self.is_known:
            return "the batch is prepared, but the ledger does not know it"
        if self.unregistered_rows:
            return f"a killed attempt left {self.unregistered_rows} finished rows that are to be registered"
        if self.abandoned:
            return "a killed attempt left its draft"
        return f"batch {self.folder.name} is prepared and its input has not changed"


def plan(context: Context) -> Plan:
    """Compare the input with what is prepared.

    Raises:
        InputError: the input or one of its columns does not exist.
    """
    spec, ledger = context.run.spec, context.claim.ledger
    description = input.check(spec.batch)
    identity = prepared.identity_of(spec, description, context.run.pins["release_id"])
    batch_id = prepared.batch_id_of(identity)
    folder = prepared.folder_of(spec.batch.output, batch_id)
    found = prepared.find(folder)
    missing: str | None = "this batch was not prepared before"
    if found is not None:
        bad = prepared.damaged(found)
        missing = f"{', '.join(bad)} missing or changed" if bad else None
    is_known = in_ledger.is_known(ledger, batch_id)
    left = rows.unregistered(ledger, found) if found is not None else []
    return Plan(
        identity,
        folder,
        description,
        missing,
        is_known,
        sum(one.rows for one in left),
        drafts.abandoned(folder, ledger),
    )


def apply(plan: Plan, context: Context) -> None:
    """Read and write the batch, make it known, take over what killed attempts left."""
    claim = context.claim
    drafts.remove(plan.abandoned)
    if plan.missing is not None:
        _read(plan, context)
    found = prepared.load(plan.folder)
    in_ledger.record(claim, found.batch_id, plan.identity, found.rows)
    # A live writer registers its own segments; nothing is left to take over then.
    if writing.become_writer(context, found.batch_id) is None:
        rows.adopt(claim, found)


def verify(context: Context) -> Outcome:
    """Read what was written, and count what is still to do.

    Raises:
        StageFailed: a prepared file is not as it was written.
        Unavailable: the input is not the one that was read.
    """
    spec = context.run.spec
    again = plan(context)
    found = prepared.find(again.folder)
    if found is None:
        raise Unavailable(
            f"{spec.batch.input} is not what was prepared a moment ago: it was replaced. Execute prepare again"
        )
    if again.missing is not None or not again.is_known:
        raise StageFailed(f"the batch is not prepared: {again.reason}; did somebody change {again.folder}?")
    answers = rows.answers_of(context.claim.ledger, found.batch_id, Path(spec.batch.output).absolute())
    counted = rows.survey(found, answers, spec)
    facts = {
        "batch_id": found.batch_id,
        "folder": str(found.folder),
        "rows": counted.rows,
        "answered": counted.answered,
        "failed": counted.failed,
        "to_do": counted.to_do,
        "prompt_tokens": found.manifest["prompt_tokens"],
        "longest_prompt_tokens": found.manifest["longest_prompt_tokens"],
    }
    message = (
        f"{counted.rows} rows, {found.manifest['prompt_tokens']} prompt tokens (longest "
        f"{found.manifest['longest_prompt_tokens']}); {counted.answered} answered, {counted.failed} failed, "
        f"{counted.to_do} to do"
    )
    return Outcome(message, facts)


def _read(plan: Plan, context: Context) -> None:
    """
    Raises:
        Unavailable: the input was replaced while it was read.
        InputError: it holds what cannot be asked.
    """
    draft = drafts.make(plan.folder, context.claim)
    try:
        written = _write_parts(plan, context, draft)
    except (InputError, StageFailed, OSError, pa.ArrowException):
        # Of a file that was replaced meanwhile, what was read may be refused for no fault of either content.
        _refuse_replaced(plan, draft)
        # Mended input is another batch, and nobody would look here again.
        drafts.discard(draft)
        raise
    _refuse_replaced(plan, draft)
    prepared.publish(plan.folder, plan.identity, written)
    shutil.rmtree(draft)


def _write_parts(plan: Plan, context: Context, draft: Path) -> list[Path]:
    batch = context.run.spec.batch
    work = Work(parts.cut(plan.description, parts.PART_ROWS), batch, _model_folder(context), draft)
    if sum(part.rows for part in work.parts) < context.settings.spark_prepare_rows:
        for part in work.parts:
            prepared_part.write(part, batch, work.model, draft)
            work.show(context.claim)
    else:
        with submission.scratch(context) as scratch:
            prepare_driver.leave(work, scratch)
            context.submit(submission.of(context))
    written = [prepared_part.path_of(part, draft) for part in work.parts]
    ids.prove(batch, work.parts, written)
    return written


def _refuse_replaced(plan: Plan, draft: Path) -> None:
    """Rows must not count under the identity of another content; what was made of them is removed."""
    # By content: a copy may keep mtime and size. About 1 s of CPU a GB of input, a hundredth of counting its tokens.
    replaced = prepared.replaced(plan.description, plan.identity)
    if replaced:
        drafts.discard(draft)
        raise Unavailable(
            f"{', '.join(replaced)} changed while it was read; nothing of it is kept. Put new input beside the "
            f"old, or rename it into place before a run begins, and execute prepare again"
        )


def _model_folder(context: Context) -> Path:
    facts = facts_of(context.claim.ledger, context.run.run_id, "download")
    if facts is None:
        raise StageFailed("the model's tokenizer is not on disk: run the stage download first")
    return Path(facts["path"])
