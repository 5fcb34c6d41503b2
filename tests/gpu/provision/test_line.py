"""Runs that want the same devices are served in order of arrival."""

import threading
from dataclasses import replace

import pytest

from tasks.errors import Busy
from tasks.ledger import close
from tasks.node.processes import this_process
from tests.gpu.provision.held import held, prepare, work_on_the_batch
from tests.runs import a_run, wait_until


def two_wait(ledger, execute, first_place_s=300):
    """run-2 and run-3 stand in line, in that order, and went away."""
    for run_id, place_s in (("run-2", first_place_s), ("run-3", 300)):
        a_run(ledger, run_id, layout={"cpu": 1})
        with pytest.raises(Busy):
            execute("provision", run_id, lease_place_s=place_s)


def test_waiting_runs_are_served_in_order_of_arrival(ledger, run, execute):
    execute("provision")
    for run_id in ("run-2", "run-3"):
        a_run(ledger, run_id, layout={"cpu": 1})
    with pytest.raises(Busy, match="leased to run run-1"):
        execute("provision", "run-2")
    with pytest.raises(Busy, match=r"1 run\(s\) wait before this one, first run-2.*number 2 in line"):
        execute("provision", "run-3")
    execute("restore")
    with pytest.raises(Busy, match=r"1 run\(s\) wait before this one, first run-2"):
        execute("provision", "run-3")
    assert execute("provision", "run-2").changed
    execute("restore", "run-2")
    assert execute("provision", "run-3").changed


def test_who_waits_for_other_gpus_is_not_in_the_way(ledger, node, execute):
    for run_id, index in (("a", 0), ("b", 0), ("c", 1)):
        a_run(ledger, run_id, layout={"mig": {"3g.40gb": 1}, "gpus": [index]})
    execute("provision", "a")
    with pytest.raises(Busy):
        execute("provision", "b")
    assert execute("provision", "c").changed


def test_who_waits_for_any_gpu_is_in_line_for_all_of_them(ledger, node, execute):
    for run_id, gpus in (("a", [0]), ("b", [1]), ("c", 1), ("d", 1), ("e", [0])):
        a_run(ledger, run_id, layout={"mig": {"3g.40gb": 1}, "gpus": gpus})
    for run_id in ("a", "b"):
        execute("provision", run_id)
    with pytest.raises(Busy, match="leased to run"):
        execute("provision", "c")
    with pytest.raises(Busy, match=r"1 run\(s\) wait before this one, first c"):
        execute("provision", "d")
    execute("restore", "a")
    for run_id in ("d", "e"):
        with pytest.raises(Busy, match="wait before this one, first c"):
            execute("provision", run_id)
    assert execute("provision", "c").changed


def test_a_run_that_went_away_loses_its_place(ledger, run, execute):
    execute("provision")
    two_wait(ledger, execute, first_place_s=0)
    execute("restore")
    assert execute("provision", "run-3").changed


def test_a_run_that_is_closed_keeps_nobody_waiting(ledger, run, execute):
    execute("provision")
    two_wait(ledger, execute)
    close(ledger, "run-2", "failed")
    execute("restore")
    assert execute("provision", "run-3").changed


def test_a_closed_run_that_is_started_again_stands_where_it_stood(ledger, run, execute):
    execute("provision")
    two_wait(ledger, execute)
    close(ledger, "run-2", "failed")
    with pytest.raises(Busy, match="leased to run run-1"):
        execute("provision", "run-2")
    execute("restore")
    with pytest.raises(Busy, match="wait before this one, first run-2"):
        execute("provision", "run-3")


def test_a_run_waits_without_devices_for_another_run_of_its_batch(ledger, run, execute):
    prepare(ledger, to_do=10)
    work = work_on_the_batch(ledger, "run-1")
    for run_id in ("run-2", "run-3"):
        a_run(ledger, run_id, layout={"cpu": 1})
    prepare(ledger, to_do=10, run_id="run-2")
    with pytest.raises(Busy, match="run run-1 is at work on the same batch batch-1"):
        execute("provision", "run-2")
    assert held(ledger) == []
    assert execute("provision", "run-3").changed, "it stands in nobody's way"
    execute("restore", "run-3")
    work.finish("done", "", {})
    assert execute("provision", "run-2").changed


def test_a_run_that_has_devices_keeps_them_whoever_works_on_its_batch(ledger, run, execute):
    a_run(ledger, "run-2", layout={"cpu": 1})
    for run_id in ("run-1", "run-2"):
        prepare(ledger, to_do=10, run_id=run_id)
    execute("provision", "run-2")
    work_on_the_batch(ledger, "run-1")
    # Less than half of what the lease is to last is left, so it is taken again.
    assert execute("provision", "run-2", lease_s=10_000.0).changed


def test_a_run_that_was_killed_at_work_on_the_batch_keeps_nobody_waiting(ledger, run, execute):
    here = this_process()
    gone = replace(here, start_ticks=here.start_ticks - 1)
    a_run(ledger, "run-2", layout={"cpu": 1})
    for run_id in ("run-1", "run-2"):
        prepare(ledger, to_do=10, run_id=run_id)
    work_on_the_batch(ledger, "run-1", gone)
    assert execute("provision", "run-2").changed


def test_a_stage_waits_until_its_turn_comes(ledger, run, execute, settings, monkeypatch):
    monkeypatch.setattr("tasks.gpu.provision._POLL_S", 0.05)
    execute("provision")
    a_run(ledger, "run-2", layout={"cpu": 1})
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(execute("provision", "run-2", lease_wait_s=60.0)), daemon=True
    )
    waiting.start()

    def has_place():
        with ledger.transaction() as connection:
            return connection.execute("select run_id from lease_place").fetchall()

    wait_until(has_place)
    execute("restore")
    waiting.join(60)
    assert found[0].changed
    assert held(ledger) == [("run-2", ("cpu:0", "cpu:1", "cpu:2"))]
    assert has_place() == []
