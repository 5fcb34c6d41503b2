"""Who may write: at most one live claim for each stage of a run, and nobody whose claim has ended."""

import threading
from itertools import count

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from psycopg.types.json import Jsonb

from tasks.errors import Fenced, InputError, Unavailable
from tasks.ledger import take
from tasks.ledger.claims import facts_of
from tasks.node.processes import Process, this_process
from tests.runs import SQL, a_run, open_ledger, outputs, python, wait_until

STAGES = ("download", "convert", "provision", "start")
RUNS = ("a", "b")

TAKE_MANY = """
import sys
from pathlib import Path
from tasks.ledger import Ledger, take
url, sql, times = sys.argv[1:]
with Ledger(url, Path(sql)) as ledger:
    ledger.close()
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(int(times)):
        claim, ended = take(ledger, "run-1", "download", frozenset({"download"}))
        print(claim.epoch, *(process.pid for process in ended))
"""


@pytest.fixture
def run(ledger):
    return a_run(ledger)


def rows(ledger, query, *arguments):
    with ledger.transaction() as connection:
        return connection.execute(query, arguments).fetchall()


def write(claim):
    claim.progress(1, 2, "rows")


def put_progress(claim, connection, done):
    claim.ledger.queries.put_progress(
        connection,
        run_id=claim.run_id,
        stage=claim.stage,
        epoch=claim.epoch,
        done=done,
        total=2,
        unit="rows",
        detail=Jsonb({}),
    )


def claim_of(ledger, stage="download", *fences):
    return take(ledger, "run-1", stage, frozenset([stage, *fences]))[0]


class Claims(RuleBasedStateMachine):
    """The ledger beside the simplest model of it: for each stage of each run, the epoch that is live."""

    claims = Bundle("claims")
    numbers = count()

    def __init__(self, ledger):
        super().__init__()
        self.ledger = ledger
        self.live = {}
        self.last = {}
        self.written = {}
        self.finished = {}

    @initialize()
    def start_two_runs(self):
        number = next(self.numbers)
        self.runs = {name: f"{name}-{number}" for name in RUNS}
        for run_id in self.runs.values():
            a_run(self.ledger, run_id)
            self.last[run_id] = 0

    @rule(
        target=claims,
        name=st.sampled_from(RUNS),
        stage=st.sampled_from(STAGES),
        fences=st.frozensets(st.sampled_from(STAGES)),
        pid=st.integers(1, 9),
    )
    def take(self, name, stage, fences, pid):
        run_id = self.runs[name]
        process = Process(pid, 1, "boot", "host")
        claim, ended = take(self.ledger, run_id, stage, fences, process)
        assert claim.epoch == self.last[run_id] + 1
        self.last[run_id] = claim.epoch
        model_ended = [self.live.pop((run_id, other), None) for other in {*fences, stage}]
        assert ended == sorted({holder for _, holder in filter(None, model_ended)})
        self.live[run_id, stage] = (claim.epoch, process)
        return claim

    @rule(claim=claims)
    def write(self, claim):
        if self.is_live(claim):
            claim.progress(claim.epoch, self.last[claim.run_id], "epochs")
            self.written[claim.run_id, claim.stage] = claim.epoch
        else:
            with pytest.raises(Fenced, match=f"epoch {claim.epoch} has ended"):
                claim.progress(0, 0, "nothing")

    @rule(claim=claims)
    def write_and_fail(self, claim):
        error = ZeroDivisionError if self.is_live(claim) else Fenced

        def fail():
            with claim.writing() as connection:
                put_progress(claim, connection, done=2)
                raise ZeroDivisionError

        with pytest.raises(error):
            fail()

    @rule(claim=claims, good=st.booleans())
    def finish(self, claim, good):
        if self.is_live(claim):
            claim.finish("done" if good else "failed", "as the test wants", {"epoch": claim.epoch})
            del self.live[claim.run_id, claim.stage]
            if good:
                self.finished[claim.run_id, claim.stage] = claim.epoch
        else:
            with pytest.raises(Fenced):
                claim.finish("done", "too late", {})

    @rule(claim=claims, pid=st.integers(10, 19))
    def hand_over(self, claim, pid):
        process = Process(pid, 2, "boot", "host")
        if self.is_live(claim):
            claim.hand_over(process)
            self.live[claim.run_id, claim.stage] = (claim.epoch, process)
        else:
            with pytest.raises(Fenced):
                claim.hand_over(process)

    @rule(claim=claims)
    def ask(self, claim):
        assert claim.is_live() == self.is_live(claim)

    @rule(name=st.sampled_from(RUNS), stage=st.sampled_from(STAGES))
    def read_facts(self, name, stage):
        run_id = self.runs[name]
        newest = self.finished.get((run_id, stage))
        assert facts_of(self.ledger, run_id, stage) == ({"epoch": newest} if newest else None)

    @invariant()
    def ledger_and_model_agree(self):
        if not self.last:
            return
        run_ids = list(self.runs.values())
        live = rows(self.ledger, "select * from claim where run_id = any(%s) and ended_at is null", run_ids)
        assert {
            (row["run_id"], row["stage"]): (
                row["epoch"],
                Process(row["pid"], row["start_ticks"], row["boot_id"], row["host"]),
            )
            for row in live
        } == self.live
        assert len(live) == len(self.live)
        progress = rows(
            self.ledger, "select run_id, stage, epoch from progress where run_id = any(%s)", run_ids
        )
        assert {(row["run_id"], row["stage"]): row["epoch"] for row in progress} == self.written

    def is_live(self, claim):
        epoch, _ = self.live.get((claim.run_id, claim.stage), (None, None))
        return epoch == claim.epoch


def test_claims_do_what_the_model_does(ledger):
    run_state_machine_as_test(
        lambda: Claims(ledger), settings=settings(max_examples=25, stateful_step_count=30, deadline=None)
    )


def test_two_processes_that_claim_at_once_get_epochs_of_their_own(database_url, ledger, run):
    times = 20
    arguments = (database_url, str(SQL), str(times))
    with python(TAKE_MANY, *arguments) as one, python(TAKE_MANY, *arguments) as other:
        for process in (one, other):
            assert process.stdout.readline() == "ready\n"
        for process in (one, other):
            process.stdin.write("go\n")
            process.stdin.flush()
        taken = [
            [int(word) for word in line.split()]
            for text in outputs([one, other])
            for line in text.splitlines()
        ]
    assert sorted(epoch for epoch, *_ in taken) == list(range(1, 2 * times + 1))
    # Everybody but the first ended exactly one claim, and only the last is live.
    assert sorted(len(ended) for _, *ended in taken) == [0, *[1] * (2 * times - 1)]
    assert rows(ledger, "select epoch from claim where ended_at is null") == [{"epoch": 2 * times}]


def test_a_successor_waits_for_a_write_that_has_begun_and_ends_its_claim_then(database_url, ledger, run):
    old = claim_of(ledger)
    taken = []
    with open_ledger(database_url) as second:
        successor = threading.Thread(target=lambda: taken.append(claim_of(second)))
        with old.writing() as connection:
            successor.start()
            with psycopg.connect(database_url, autocommit=True) as onlooker:
                wait_until(
                    lambda: onlooker.execute(
                        "select from pg_stat_activity where wait_event_type = 'Lock' "
                        "and datname = current_database()"
                    ).fetchall()
                )
            assert not taken
            put_progress(old, connection, done=2)
        successor.join()
    assert [claim.epoch for claim in taken] == [2]
    assert rows(ledger, "select done from progress") == [{"done": 2}]
    with pytest.raises(Fenced):
        write(old)


def test_writes_outside_of_a_claim_are_refused_by_the_schema(ledger, run):
    claim = claim_of(ledger)
    write(claim)
    for statement in ("update progress set done = 0", "delete from progress", "delete from lease"):
        with pytest.raises(psycopg.Error, match="outside of a claim") as refused:
            rows(ledger, statement)
        assert refused.value.sqlstate == "QP002"


def test_the_right_to_write_ends_with_the_transaction(ledger, run):
    write(claim_of(ledger))
    with pytest.raises(psycopg.Error, match="outside of a claim"):
        rows(ledger, "delete from progress")


def test_claiming_a_stage_opens_a_closed_run_again(ledger, run):
    with ledger.transaction() as connection:
        ledger.queries.close_run(connection, run_id="run-1", verdict="failed")
    claim_of(ledger)
    assert rows(ledger, "select closed_at, verdict from run") == [{"closed_at": None, "verdict": None}]


def test_a_claim_records_who_holds_it(ledger, run):
    claim_of(ledger)
    assert take(ledger, "run-1", "convert", frozenset({"download"}))[1] == [this_process()]


def test_a_run_that_does_not_exist_cannot_be_claimed(ledger):
    with pytest.raises(InputError, match="no run 'nobody'"):
        take(ledger, "nobody", "download", frozenset())


def test_a_connection_that_was_lost_between_two_writes_is_opened_anew(ledger, run):
    claim = claim_of(ledger)
    end_connections_of(ledger)
    write(claim)
    assert rows(ledger, "select done from progress") == [{"done": 1}]


def test_a_connection_that_is_lost_within_a_write_leaves_nothing_half_done(ledger, run):
    claim = claim_of(ledger)

    def lose_it():
        with claim.writing() as connection:
            connection.execute("update claim set message = 'half'")
            end_connections_of(ledger)
            connection.execute("select")

    with pytest.raises(Unavailable, match="try again"):
        lose_it()
    assert rows(ledger, "select message from claim") == [{"message": None}]
    write(claim)


def test_a_ledger_that_is_not_there_is_unavailable_and_the_password_is_not_told(database_url, ledger):
    nobody_listens = psycopg.conninfo.make_conninfo(database_url, port="1")
    password = psycopg.conninfo.conninfo_to_dict(database_url)["password"]
    gone = type(ledger)(nobody_listens, SQL, patience_s=0.0)
    with pytest.raises(Unavailable, match="cannot be reached") as refused, gone.transaction():
        pass
    assert password not in str(refused.value)


def end_connections_of(ledger):
    """As a restart of PostgreSQL does."""
    with psycopg.connect(ledger._url, autocommit=True) as other:
        other.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
