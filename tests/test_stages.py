"""A stage is executed by one holder at a time: whoever held it before is ended, or ends by itself."""

import dataclasses
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from psycopg.types.json import Jsonb

from tasks import stages
from tasks.errors import Busy, Fenced, InputError, StageFailed
from tasks.ledger import close, load, take
from tasks.ledger.claims import facts_of
from tasks.ledger.runs import reckon_deadline_anew
from tasks.node import lock, processes
from tasks.spec import Limits
from tasks.spec.freeze import resolve_deadline
from tasks.stage_list import STAGES
from tests import acting_stage
from tests.runs import a_run, a_spec, environment_of, open_ledger, python, settings_of, wait_until

BERLIN = ZoneInfo("Europe/Berlin")

ACT = """
import dataclasses, logging, sys
from tasks import stages
from tasks.errors import StageError
from tasks.node import processes
from tasks.stage_list import STAGES

logging.basicConfig(stream=sys.stdout)
if sys.argv[1]:
    processes.host = lambda: sys.argv[1]
STAGES["download"] = dataclasses.replace(STAGES["download"], module="tests.acting_stage")
try:
    print(stages.execute("download", "run-1").message)
except StageError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_status)
"""


@pytest.fixture
def home(tmp_path):
    return tmp_path


@pytest.fixture
def settings(home, database_url):
    own = settings_of(home, database_url, lock_wait_s=60.0)
    yield own
    processes.end_all(lambda: processes.find(deployment=own.deployment), grace_s=0)


@pytest.fixture
def ledger(database_url):
    with open_ledger(database_url) as opened:
        a_run(opened)
        yield opened


@pytest.fixture
def acting(monkeypatch):
    """The stage `download` is `tests/acting_stage.py` in this process."""
    monkeypatch.setitem(
        STAGES, "download", dataclasses.replace(STAGES["download"], module=acting_stage.__name__)
    )
    monkeypatch.setenv("ACTS_IN_LEDGER", "yes")


def actor(settings, host="", acts_in_ledger=True):
    """A process that executes the stage, on this host or on one that only its records say it is on."""
    environment = {**environment_of(settings), "ACTS_IN_LEDGER": "yes" if acts_in_ledger else "no"}
    return python(ACT, host, env=environment)


def claims(ledger):
    with ledger.transaction() as connection:
        return {
            row["epoch"]: row["outcome"] for row in connection.execute("select epoch, outcome from claim")
        }


def progress(ledger):
    with ledger.transaction() as connection:
        return connection.execute("select epoch, done from progress").fetchone()


def acts(home, process):
    try:
        return int((home / f"acts-{process.pid}").read_text() or 0)
    except FileNotFoundError:
        return 0


def suspend(process):
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def waits_for_the_lock(settings, process):
    lock_file = str(settings.locks / "run-1-weights.lock")
    fds = Path(f"/proc/{process.pid}/fd")
    return any(os.readlink(fd) == lock_file for fd in fds.iterdir())


def test_an_old_holder_on_this_host_is_ended_before_its_successor_acts(ledger, settings, home):
    with actor(settings) as old:
        wait_until(lambda: acts(home, old) > 2)
        suspend(old)
        before, recorded = acts(home, old), progress(ledger)
        (home / "enough").touch()
        with actor(settings) as successor:
            assert successor.wait(60) == 0, successor.stdout.read()
        assert old.wait(10) == -signal.SIGKILL
    assert acts(home, old) == before
    assert progress(ledger) == recorded
    assert claims(ledger) == {1: "fenced", 2: "done"}
    with lock.held(settings.locks / "run-1-weights.lock", "see that it is free", 0):
        pass


def test_an_old_holder_that_nobody_can_end_is_refused_by_the_ledger_and_gives_its_lock_up(
    ledger, settings, home
):
    blind = settings.model_copy(update={"claim_watch_s": 600.0})
    with actor(blind, host="elsewhere") as old:
        wait_until(lambda: acts(home, old) > 2)
        suspend(old)
        before, recorded = acts(home, old), progress(ledger)
        with actor(settings) as successor:
            wait_until(lambda: 2 in claims(ledger) and waits_for_the_lock(settings, successor))
            assert (old.poll(), successor.poll()) == (None, None)
            assert acts(home, successor) == 0
            assert progress(ledger) == recorded
            old.send_signal(signal.SIGCONT)
            assert old.wait(20) == Fenced.exit_status
            assert (
                "Fenced stage download of run run-1 was claimed again: epoch 1 has ended" in old.stdout.read()
            )
            wait_until(lambda: acts(home, successor) > 2)
            (home / "enough").touch()
            assert successor.wait(20) == 0, successor.stdout.read()
    assert (home / f"refused-{old.pid}").read_text() == "Fenced"
    assert (
        acts(home, old) - before <= 1
    )  # the file of an act whose record was in the ledger when it was suspended
    assert progress(ledger)["epoch"] == 2
    assert claims(ledger) == {1: "fenced", 2: "done"}


def test_an_old_holder_that_nobody_can_end_and_that_writes_nothing_is_ended_by_its_watch(
    ledger, settings, home
):
    watchful = settings.model_copy(update={"claim_watch_s": 0.2})
    with actor(watchful, host="elsewhere", acts_in_ledger=False) as old:
        wait_until(lambda: acts(home, old) > 2)
        suspend(old)
        with actor(settings) as successor:
            wait_until(lambda: 2 in claims(ledger) and waits_for_the_lock(settings, successor))
            assert (old.poll(), acts(home, successor)) == (None, 0)
            old.send_signal(signal.SIGCONT)
            assert old.wait(20) == Fenced.exit_status
            assert "was claimed again; epoch 1 ends here" in old.stdout.read()
            wait_until(lambda: acts(home, successor) > 2)
            (home / "enough").touch()
            assert successor.wait(20) == 0, successor.stdout.read()
    assert claims(ledger) == {1: "fenced", 2: "done"}


def test_a_holder_that_keeps_the_lock_makes_its_successor_busy_and_that_is_recorded(
    ledger, settings, home, acting
):
    impatient = settings.model_copy(update={"lock_wait_s": 0.2})
    blind = settings.model_copy(update={"claim_watch_s": 600.0})
    with actor(blind, host="elsewhere") as old:
        wait_until(lambda: acts(home, old) > 2)
        suspend(old)
        with pytest.raises(Busy, match=rf"held by stage download of run run-1 \(pid {old.pid}\)"):
            stages.execute("download", "run-1", settings=impatient)
    assert claims(ledger) == {1: "fenced", 2: "failed"}


def test_children_of_an_old_holder_are_ended_with_it(ledger, settings, home, acting):
    marks = {processes.DEPLOYMENT: settings.deployment, "PATH": os.environ["PATH"]}
    parts = ("run-1/download", "run-1/preflight", "run-1/convert", "run-10/download")
    children = {
        part: processes.spawn(["sleep", "1000"], {**marks, processes.PART: part}, home / "log.txt")
        for part in parts
    }
    (home / "enough").touch()
    stages.execute("download", "run-1", settings=settings)
    # `preflight` is over once `download` is claimed; `convert` is another stage, and run-10 another run.
    assert [children[part].poll() for part in parts] == [-signal.SIGKILL, -signal.SIGKILL, None, None]


def test_what_cannot_be_ended_fails_the_stage_and_that_is_recorded(ledger, settings, acting, monkeypatch):
    hanging = processes.this_process()
    monkeypatch.setattr(processes, "end", lambda holders, grace_s: [hanging])
    with pytest.raises(StageFailed, match=rf"{hanging.pid} .*do not end, not even after SIGKILL"):
        stages.execute("download", "run-1", settings=settings)
    assert claims(ledger) == {1: "failed"}


def test_a_world_that_is_as_wanted_is_not_changed_and_says_why(ledger, settings, home, acting):
    (home / "done").touch()
    result = stages.execute("download", "run-1", settings=settings)
    assert (result.changed, result.message) == (False, "nothing to do: the file is there")
    assert claims(ledger) == {1: "nothing to do"}
    assert facts_of(ledger, "run-1", "download") == {"epoch": 1}
    assert acts(home, processes.this_process()) == 0


def test_a_failure_is_recorded_with_its_message(ledger, settings, acting, monkeypatch):
    def fail(context):
        raise StageFailed("the disk is full: make room")

    monkeypatch.setattr(acting_stage, "plan", fail)
    with pytest.raises(StageFailed, match="disk is full"):
        stages.execute("download", "run-1", settings=settings)
    with ledger.transaction() as connection:
        row = connection.execute("select outcome, message from claim").fetchone()
    assert row == {"outcome": "failed", "message": "the disk is full: make room"}


@pytest.mark.parametrize("stage", ["provision", "start", "stop", "restore"])
def test_on_another_host_than_the_specs_nobodys_claim_is_ended(ledger, settings, stage):
    claim, _ = take(ledger, "run-1", "keeper", frozenset({"keeper"}))
    elsewhere = settings.model_copy(update={"node": "dgx-02"})
    with pytest.raises(InputError, match="this host is 'dgx-02'"):
        stages.execute(stage, "run-1", settings=elsewhere)
    claim.progress(1, 1, "keeps")


def test_an_old_holder_records_no_failure_over_its_successor(ledger, settings, home, acting, monkeypatch):
    def lose_the_claim(context):
        take(ledger, "run-1", "download", frozenset())
        context.claim.progress(1, 1, "acts")

    monkeypatch.setattr(acting_stage, "plan", lose_the_claim)
    with pytest.raises(Fenced):
        stages.execute("download", "run-1", settings=settings)
    assert claims(ledger) == {1: "fenced", 2: None}


def test_every_stage_fences_itself_and_only_stages_that_are_over_by_then():
    order = list(STAGES)
    for place, stage in enumerate(STAGES.values()):
        assert stage.name in stage.fences
        assert stage.fences - {"keeper"} <= set(order[: place + 1])


def test_a_run_keeps_the_spec_that_it_started_with(ledger, settings, monkeypatch):
    from tasks.weights import pin

    asked = []
    monkeypatch.setattr(pin, "pin", lambda spec, settings: asked.append(spec) or {"commit": f"c{len(asked)}"})
    at = datetime(2026, 3, 9, tzinfo=UTC)
    spec = a_spec(batch={"input": "/in/{{ ds }}", "output": "/out", "prompt": "p"})
    run = stages.freeze(ledger, "nightly", spec, at, settings)
    assert run.spec.batch.input == "/in/2026-03-09"
    later = stages.freeze(ledger, "nightly", spec, datetime(2026, 3, 10, tzinfo=UTC), settings)
    assert (later.spec, later.pins["commit"]) == (run.spec, "c1")
    assert len(asked) == 1
    # A version of this project that had no such field yet.
    asked = {**run.pins["asked"], "limits": {"deadline": "6h"}}
    with ledger.transaction() as connection:
        connection.execute("update run set pins = pins || %s", [Jsonb({"asked": asked})])
    assert stages.freeze(ledger, "nightly", spec, at, settings).spec == run.spec
    changed = spec.model_copy(update={"limits": Limits(partial=True)})
    with pytest.raises(InputError, match=r"another spec \(limits differ\)"):
        stages.freeze(ledger, "nightly", changed, at, settings)


@pytest.fixture
def of_last_week(ledger, settings, monkeypatch):
    """A run that started a week ago, with that deadline; where it is given a verdict it has ended."""
    monkeypatch.setattr("tasks.weights.pin.pin", lambda spec, settings: {})

    def make(deadline, verdict="failed"):
        then = datetime.now(BERLIN) - timedelta(days=7)
        spec = a_spec(limits={"deadline": deadline})
        stages.freeze(ledger, "late", spec, then, settings)
        with ledger.transaction() as connection:
            connection.execute(
                "update run set started_at = %s, due_from = %s, spec = %s where run_id = 'late'",
                [then, then, Jsonb(resolve_deadline(spec, then).model_dump(mode="json"))],
            )
        if verdict is not None:
            close(ledger, "late", verdict)
        return spec, load(ledger, "late")

    return make


@pytest.mark.parametrize("deadline", ["6h", "07:00"])
def test_a_run_that_is_started_again_after_its_end_and_its_deadline_gets_a_new_one(
    ledger, settings, of_last_week, deadline, caplog
):
    caplog.set_level("INFO")
    spec, before = of_last_week(deadline)
    again = stages.freeze(ledger, "late", spec, datetime.now(BERLIN), settings)
    now = datetime.now(BERLIN)
    if deadline == "6h":
        assert again.deadline - now == pytest.approx(timedelta(hours=6), abs=timedelta(minutes=1))
        assert again.winds_down_at == again.deadline - timedelta(minutes=5)
    else:
        assert now < again.deadline <= now + timedelta(hours=25)
        assert f"{again.deadline.astimezone(BERLIN):%H:%M}" == "07:00"
    assert again == load(ledger, "late")
    assert (again.started_at, again.verdict) == (before.started_at, "failed")
    assert stages.what_differs(again, spec) == []
    assert f"it is {deadline} again from now on, which is {again.deadline.isoformat()[:10]}" in caplog.text
    # Killed right after it, and executed again.
    assert stages.freeze(ledger, "late", spec, datetime.now(BERLIN), settings) == again


def test_a_run_that_is_open_or_has_time_left_keeps_its_deadline(ledger, settings, of_last_week):
    spec, before = of_last_week("6h", verdict=None)
    assert stages.freeze(ledger, "late", spec, datetime.now(UTC), settings) == before
    assert reckon_deadline_anew(ledger, "late", "6h") == before
    close(ledger, "late", "partial")
    renewed = stages.freeze(ledger, "late", spec, datetime.now(UTC), settings)
    assert stages.freeze(ledger, "late", spec, datetime.now(UTC), settings) == renewed != before


def test_a_deadline_that_names_a_date_stays_and_that_is_said(ledger, settings, of_last_week, caplog):
    spec, before = of_last_week("2026-01-01T07:00+01:00")
    assert stages.freeze(ledger, "late", spec, datetime.now(UTC), settings) == before
    assert "a moment of the past (2026-01-01T07:00+01:00)" in caplog.text
