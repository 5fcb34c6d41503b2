"""What the ledger knows about batches: who writes to one, which bytes of which segments count, what is
published.

Every write is under a claim; see `tasks.ledger.claims`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from tasks.errors import Busy, Fenced
from tasks.ledger import Claim, Ledger
from tasks.ledger.claims import Holder, holder_of

_NOT_THE_WRITER = "QP003"


@dataclass(frozen=True)
class Range:
    """Bytes of a segment, from one record's beginning to another's end, and how many records that is."""

    path: Path
    start: int
    stop: int
    rows: int
    run_id: str = ""
    """The run under which it was registered."""
    tokens: int = 0
    """Of prompts and answers, when it is to be registered."""


def record(claim: Claim, batch_id: str, identity: dict[str, Any], rows: int) -> None:
    """Make the batch known, as one that is prepared; its rows and identity stay as they are."""
    with claim.writing() as connection:
        claim.ledger.queries.insert_batch(connection, batch_id=batch_id, identity=Jsonb(identity), rows=rows)


def is_known(ledger: Ledger, batch_id: str) -> bool:
    """Whether the batch was recorded."""
    with ledger.transaction() as connection:
        return bool(ledger.queries.is_batch_known(connection, batch_id=batch_id))


def become_writer(claim: Claim, batch_id: str) -> Holder | None:
    """Let `claim` write to the batch, unless another run's live claim does: then says whose, and changes
    nothing.

    The same run's older claim has ended already or ends by itself: its stage was claimed anew.
    """
    with claim.writing() as connection:
        queries = claim.ledger.queries
        queries.lock_batch(connection, batch_id=batch_id)
        found = queries.writer_of_batch(connection, batch_id=batch_id)
        mine = found is not None and (found["run_id"], found["epoch"]) == (claim.run_id, claim.epoch)
        if found is not None and not mine:
            return holder_of(found)
        queries.set_writer_of_batch(connection, batch_id=batch_id, run_id=claim.run_id, epoch=claim.epoch)
    return None


def register(claim: Claim, batch_id: str, ranges: Iterable[Range]) -> None:
    """From now on these bytes count.

    Raises:
        Fenced: the claim has ended, or is not the batch's writer: the schema refuses it.
    """
    with claim.writing() as connection:
        try:
            for one in ranges:
                claim.ledger.queries.register_segment(
                    connection,
                    batch_id=batch_id,
                    path=str(one.path),
                    run_id=claim.run_id,
                    epoch=claim.epoch,
                    start_byte=one.start,
                    stop_byte=one.stop,
                    rows=one.rows,
                    tokens=one.tokens,
                )
        except psycopg.Error as error:
            if error.sqlstate != _NOT_THE_WRITER:
                raise
            raise Fenced(
                f"epoch {claim.epoch} of run {claim.run_id} is not the writer of batch {batch_id}: another run "
                f"writes to it now, and this process must not"
            ) from None


def registered(ledger: Ledger, batch_id: str) -> list[Range]:
    """What counts, in the order of commits."""
    with ledger.transaction() as connection:
        rows = list(ledger.queries.segments_of_batch(connection, batch_id=batch_id))
    return [
        Range(Path(row["path"]), row["start_byte"], row["stop_byte"], row["rows"], row["run_id"])
        for row in rows
    ]


def pace(claim: Claim, batch_id: str) -> tuple[int, float]:
    """Rows registered under the claim, and the seconds from its beginning to the last of them."""
    with claim.ledger.transaction() as connection:
        row = claim.ledger.queries.pace_of_claim(
            connection, batch_id=batch_id, run_id=claim.run_id, epoch=claim.epoch
        )
    return int(row["rows"]), float(row["seconds"] or 0.0)


@contextmanager
def publishing(claim: Claim, output: Path) -> Iterator[None]:
    """A transaction in which nobody else publishes to `output`, on whatever host.

    Raises:
        Fenced: the claim has ended.
        Busy: somebody else is publishing there and does not come to an end.
    """
    with claim.writing() as connection:
        try:
            claim.ledger.queries.lock_output(connection, output=str(output))
        except psycopg.errors.LockNotAvailable:
            raise Busy(f"another run is publishing to {output}; try again when it is done") from None
        yield


def record_publication(
    claim: Claim, batch_id: str, output: Path, version: str, *, answered: int, failed: int, not_started: int
) -> None:
    """Remember that this version is what readers of `output` see."""
    with claim.writing() as connection:
        claim.ledger.queries.insert_publication(
            connection,
            batch_id=batch_id,
            output=str(output),
            version=version,
            run_id=claim.run_id,
            epoch=claim.epoch,
            answered=answered,
            failed=failed,
            not_started=not_started,
        )


def is_published(ledger: Ledger, batch_id: str, output: Path, version: str) -> bool:
    """Whether `record_publication` remembered this version."""
    with ledger.transaction() as connection:
        return bool(
            ledger.queries.is_published(connection, batch_id=batch_id, output=str(output), version=version)
        )
