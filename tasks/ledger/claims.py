"""Claims: who may act for a stage of a run, and how an old holder is kept from writing.

Airflow can run one stage twice at once: a killed task's process lives on, and everything killed is executed
again. So the holder is the run, never a try. Claiming a stage ends the live claims of that stage and of what
comes before it, and gives out a new epoch; every write goes through `Claim.writing`, which fails once the claim
has ended. What cannot check an epoch (signals, NVML, files) is guarded by node locks, see `tasks.stages`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import psycopg
from psycopg.types.json import Jsonb

from tasks.errors import Fenced, InputError
from tasks.ledger.connection import Connection, Ledger
from tasks.node.processes import Process, host, this_process

Outcome = Literal["done", "nothing to do", "failed"]

_CLAIM_HAS_ENDED = "QP001"

_KEEPS_CLOSED = frozenset({"reap", "remove", "keeper"})
"""A closed run is open again once somebody works for it; giving back what it held is no work. Killed in the
middle, it would leave the run open, and its lease with it. A keeper is made by a `start`, whose own claim is what
opens the run: one that lives on after its run was given up must not open it."""


@dataclass(frozen=True)
class Claim:
    """The right to act for one stage of one run, until somebody claims it anew."""

    ledger: Ledger
    run_id: str
    stage: str
    epoch: int

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction in which the ledger may be written; a successor waits for it to end.

        Raises:
            Fenced: the claim has ended, so nothing is written.
        """
        with self.ledger.transaction() as connection:
            try:
                self.ledger.queries.act_as(connection, run_id=self.run_id, epoch=self.epoch)
            except psycopg.Error as error:
                if error.sqlstate != _CLAIM_HAS_ENDED:
                    raise
                raise self._fenced() from None
            yield connection

    def is_live(self) -> bool:
        """Whether this claim is still the newest; false for good once it is false."""
        with self.ledger.transaction() as connection:
            return bool(self.ledger.queries.is_live(connection, run_id=self.run_id, epoch=self.epoch))

    def progress(self, done: int, total: int, unit: str, **detail: Any) -> None:
        """Show how far the stage is."""
        with self.writing() as connection:
            self.ledger.queries.put_progress(
                connection,
                run_id=self.run_id,
                stage=self.stage,
                epoch=self.epoch,
                done=done,
                total=total,
                unit=unit,
                detail=Jsonb(detail),
            )

    def finish(self, outcome: Outcome, message: str, facts: dict[str, Any]) -> None:
        """End the claim: the last write under it.

        Raises:
            Fenced: it had ended already.
        """
        with self.ledger.transaction() as connection:
            ended = self.ledger.queries.finish(
                connection,
                run_id=self.run_id,
                epoch=self.epoch,
                outcome=outcome,
                message=message,
                facts=Jsonb(facts),
            )
            if ended != 1:
                raise self._fenced()

    def hand_over(self, process: Process) -> None:
        """Another process acts under this claim from now on; a successor will end that one."""
        with self.writing() as connection:
            self.ledger.queries.hand_over(connection, run_id=self.run_id, epoch=self.epoch, **asdict(process))

    def in_thread(self) -> "Claim":
        """The same claim over a connection of its own."""
        return Claim(self.ledger.again(), self.run_id, self.stage, self.epoch)

    def _fenced(self) -> Fenced:
        return Fenced(
            f"stage {self.stage} of run {self.run_id} was claimed again: epoch {self.epoch} has ended, so this "
            f"process must not write and ends here; whoever claimed it goes on"
        )


def take(
    ledger: Ledger,
    run_id: str,
    stage: str,
    fences: frozenset[str],
    process: Process | None = None,
) -> tuple[Claim, list[Process]]:
    """Claim `stage` of the run, and end the live claims of every stage in `fences` (itself among them).

    Returns the claim and the processes that held the ended ones; the caller ends those before it acts.

    Raises:
        InputError: there is no such run.
    """
    with ledger.transaction() as connection:
        queries = ledger.queries
        if queries.lock_run(connection, run_id=run_id) is None:
            raise InputError(f"there is no run {run_id!r} in the ledger")
        epoch = queries.next_epoch(connection, run_id=run_id, reopens=stage not in _KEEPS_CLOSED)
        fenced = list(
            queries.fence(
                connection,
                run_id=run_id,
                stages=sorted(fences | {stage}),
                message=f"claimed by {stage} with epoch {epoch}",
            )
        )
        queries.insert_claim(
            connection,
            run_id=run_id,
            epoch=epoch,
            stage=stage,
            **asdict(process or this_process()),
        )
    holders = {Process(row["pid"], row["start_ticks"], row["boot_id"], row["host"]) for row in fenced}
    return Claim(ledger, run_id, stage, epoch), sorted(holders)


@dataclass(frozen=True)
class Holder:
    """Who acts under a live claim."""

    run_id: str
    epoch: int
    stage: str
    process: Process

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to be dead, so that nobody acts under its claim any more.

        A process of another host may live, for all that is known here.
        """
        here = self.process.host == host()
        return here and not self.process.is_alive()


def acting(ledger: Ledger) -> list[Holder]:
    """Everybody who may act now; those whose process is known to be dead are left out."""
    with ledger.transaction() as connection:
        rows = list(ledger.queries.live_claims(connection))
    return [holder for holder in map(holder_of, rows) if not holder.is_gone]


def writer_of(ledger: Ledger, batch_id: str) -> Holder | None:
    """Whose live claim writes to the batch; its process may be dead."""
    with ledger.transaction() as connection:
        found = ledger.queries.writer_of_batch(connection, batch_id=batch_id)
    return holder_of(found) if found is not None else None


def holder_of(row: dict[str, Any]) -> Holder:
    """From a row that names a claim and its process."""
    process = Process(row["pid"], row["start_ticks"], row["boot_id"], row["host"])
    return Holder(row["run_id"], row["epoch"], row["stage"], process)


def facts_of(ledger: Ledger, run_id: str, stage: str) -> dict[str, Any] | None:
    """What the stage found when it last succeeded in this run; None if it never did."""
    with ledger.transaction() as connection:
        facts = ledger.queries.facts_of(connection, run_id=run_id, stage=stage)
    return dict(facts) if facts is not None else None
