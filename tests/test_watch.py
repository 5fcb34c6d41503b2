"""An actor that has lost its claim is told, and only then."""

import threading

import psycopg
import pytest

from tasks.errors import Unavailable
from tasks.ledger import take
from tasks.watch import watching
from tests.runs import a_run, environment_of, open_ledger, python, settings_of, wait_until

EVERY_S = 0.02

ACT = """
import time
from pathlib import Path
from tasks import settings
from tasks.ledger import Ledger, take
from tasks.watch import watching
own = settings.current()
with Ledger(own.database_url(), own.sql) as ledger:
    claim, _ = take(ledger, "run-1", "download", frozenset())
    try:
        with watching(claim, 0.05):
            print("acts", flush=True)
            time.sleep(1000)
    finally:
        print("cleans up", flush=True)
"""


@pytest.fixture
def ledger(database_url):
    with open_ledger(database_url) as opened:
        a_run(opened)
        yield opened


@pytest.fixture
def claim(ledger):
    return claim_it(ledger)


def claim_it(ledger):
    return take(ledger, "run-1", "download", frozenset())[0]


def test_the_loss_of_a_claim_is_noticed(ledger, claim):
    lost = threading.Event()
    with watching(claim, EVERY_S, lost.set):
        claim_it(ledger)
        assert lost.wait(20)


def test_a_live_claim_is_left_alone(claim, monkeypatch):
    lost, looks = threading.Event(), []
    is_live = type(claim).is_live
    monkeypatch.setattr(type(claim), "is_live", lambda self: looks.append(self) or is_live(self))
    with watching(claim, EVERY_S, lost.set):
        wait_until(lambda: len(looks) >= 3)
    assert not lost.is_set()


def test_nothing_is_noticed_after_the_block(ledger, claim):
    lost = threading.Event()
    with watching(claim, EVERY_S, lost.set):
        pass
    claim_it(ledger)
    assert not lost.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("watch-")]


@pytest.mark.parametrize("trouble", [Unavailable("gone"), psycopg.errors.QueryCanceled("too slow")], ids=repr)
def test_a_ledger_that_does_not_answer_is_no_loss_and_the_watch_goes_on(ledger, claim, monkeypatch, trouble):
    lost, troubles = threading.Event(), iter([trouble] * 3)
    is_live = type(claim).is_live

    def sometimes(self):
        if (error := next(troubles, None)) is not None:
            raise error
        return is_live(self)

    monkeypatch.setattr(type(claim), "is_live", sometimes)
    with watching(claim, EVERY_S, lost.set):
        wait_until(lambda: next(troubles, None) is None)
        assert not lost.is_set()
        claim_it(ledger)
        assert lost.wait(20)


def test_a_process_that_has_lost_its_claim_ends_without_cleaning_up(ledger, database_url, tmp_path):
    with python(ACT, env=environment_of(settings_of(tmp_path, database_url))) as actor:
        assert actor.stdout.readline() == "acts\n"
        claim_it(ledger)
        assert actor.wait(20) == 4
        said = actor.stdout.read()
    assert "stage download of run run-1 was claimed again; epoch 1 ends here" in said
    assert "cleans up" not in said
