"""A layout without GPUs: cores are leased, renewed and given back."""

import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from psycopg.types.json import Jsonb

from tasks.errors import Busy, InputError, StageFailed
from tasks.gpu import inventory
from tasks.ledger import leases, take
from tasks.node import processes
from tasks.serving import pools
from tasks.serving.pools import Wanted
from tests.gpu.provision.held import held, prepare
from tests.runs import LEADERLESS, a_run, wait_until


def test_a_cpu_layout_leases_cores_and_leaves_mig_alone(ledger, run, execute, node):
    prepare(ledger, to_do=10)
    node.library.calls.clear()
    result = execute("provision")
    assert result.changed
    assert result.message.endswith("2 worker slot(s); this layout uses no GPU: MIG is left as it is")
    (lease,) = leases.live_leases(ledger)
    assert result.facts == {
        "lease_id": lease.lease_id,
        "node": "local",
        "simulated": False,
        "slots": [
            {"slot_id": "cpu-0", "kind": "cpu", "cores": [0, 1]},
            {"slot_id": "cpu-1", "kind": "cpu", "cores": [2]},
        ],
    }
    assert held(ledger) == [("run-1", ("cpu:0", "cpu:1", "cpu:2"))]
    assert node.library.calls.total() == 0


def test_provisioning_again_changes_nothing(ledger, run, execute):
    first = execute("provision")
    again = execute("provision")
    assert (again.changed, again.facts) == (False, first.facts)
    assert (
        again.message
        == f"nothing to do: this run holds lease {first.facts['lease_id']} on cpu:0, cpu:1, cpu:2 already"
    )


def test_no_device_is_taken_when_no_row_is_to_do(ledger, run, execute):
    prepare(ledger, to_do=0)
    result = execute("provision")
    assert (result.changed, result.message) == (
        False,
        "nothing to do: no row is left to do, so no device is taken",
    )
    assert result.facts == {"lease_id": None, "node": "local", "simulated": False, "slots": []}
    assert held(ledger) == []


def test_a_lease_that_runs_out_soon_is_renewed(ledger, run, execute):
    first = execute("provision", lease_s=60.0)
    again = execute("provision", lease_s=600.0)
    assert again.changed
    assert again.facts == first.facts
    assert leases.lease_of(ledger, "run-1", "local").left_s > 500


def test_a_run_comes_back_for_the_lease_that_it_abandoned(ledger, run, execute):
    first = execute("provision")
    claim, _ = take(ledger, "run-1", "start", frozenset())
    leases.abandon(claim, first.facts["lease_id"], "start failed")
    again = execute("provision")
    assert (again.changed, again.facts) == (True, first.facts)


def test_another_run_is_busy_until_the_first_is_restored(ledger, run, execute):
    a_run(ledger, "run-2", layout={"cpu": 1})
    execute("provision")
    with pytest.raises(Busy, match="cpu:0, cpu:1, cpu:2 of local are leased to run run-1 until"):
        execute("provision", "run-2")
    execute("restore")
    assert execute("provision", "run-2").changed
    assert held(ledger) == [("run-2", ("cpu:0", "cpu:1", "cpu:2"))]


def test_more_workers_than_cores_are_refused(ledger, execute):
    a_run(ledger, layout={"cpu": 4})
    with pytest.raises(InputError, match=r"layout\.cpu: 4 workers .* may use 3"):
        execute("provision")
    assert held(ledger) == []


def test_a_leased_core_that_is_gone_is_not_worked_around(ledger, run, execute, monkeypatch):
    execute("provision")
    monkeypatch.setattr(inventory, "available_cores", lambda: (0, 1))
    with pytest.raises(StageFailed, match=r"holds cpu:2, which this node does not offer.*restore"):
        execute("provision")
    execute("restore")
    assert execute("provision").facts["slots"][1]["cores"] == [1]


@pytest.mark.parametrize("stage", ["provision", "restore"])
def test_devices_are_taken_and_given_back_on_their_own_node_only(ledger, run, execute, stage):
    with pytest.raises(InputError, match="node: the spec asks for 'local', and this host is 'dgx-9'"):
        execute(stage, node="dgx-9")


def test_restore_ends_the_lease_and_again_changes_nothing(ledger, run, execute):
    execute("provision")
    assert execute("restore").changed
    assert held(ledger) == []
    again = execute("restore")
    assert (again.changed, again.message) == (False, "nothing to do: this run holds no lease on local")


def lease_is_kept_until_it_ends(child, ledger, execute):
    with pytest.raises(StageFailed, match=rf"process\(es\) {child.pid} of this run's pool still live"):
        execute("restore")
    assert held(ledger) == [("run-1", ("cpu:0", "cpu:1", "cpu:2"))]
    child.kill()
    child.wait()
    execute("restore")
    assert held(ledger) == []


@pytest.mark.parametrize("part", ["keeper", "worker-11"])
def test_restore_keeps_the_lease_while_a_process_of_the_pool_lives(
    ledger, run, execute, settings, tmp_path, part
):
    execute("provision")
    marks = {
        processes.DEPLOYMENT: settings.deployment,
        processes.PART: f"run-1/{part}",
        "PATH": os.environ["PATH"],
    }
    child = processes.spawn(["sleep", "1000"], marks, tmp_path / "log.txt")
    lease_is_kept_until_it_ends(child, ledger, execute)


@pytest.mark.parametrize("what", ["keeper", "server"])
def test_restore_keeps_the_lease_while_a_process_lives_that_the_ledger_alone_knows(
    ledger, run, execute, tmp_path, what
):
    lease_id = execute("provision").facts["lease_id"]
    child = processes.spawn([sys.executable, "-c", LEADERLESS], {}, tmp_path / "log.txt")
    wait_until(lambda: b") Z " in Path(f"/proc/{child.pid}/stat").read_bytes())
    claim, _ = take(ledger, "run-1", "keeper", frozenset({"keeper"}))
    pools.intend(claim, "run-1.7", "local", Wanted("release", tmp_path, (), lease_id))
    identity = {"pool_id": "run-1.7", **asdict(processes.identify(child.pid))}
    worker = {"worker_id": "worker-0", "attempt": 1}
    with claim.writing() as connection:
        if what == "keeper":
            ledger.queries.pool_started(connection, registry="http://localhost:1", **identity)
        else:
            ports = {"first_port": 1, "end_port": 2}
            ledger.queries.intend_worker(
                connection, pool_id="run-1.7", command=Jsonb([]), log="log", **worker, **ports
            )
            ledger.queries.worker_started(connection, **worker, **identity)
    assert [process.pid for process in pools.processes_of(ledger, "run-1")] == [child.pid]
    lease_is_kept_until_it_ends(child, ledger, execute)
