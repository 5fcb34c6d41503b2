"""What a run holds, and what it is to hold."""

from tasks.batch import in_ledger
from tasks.ledger import leases, take

BATCH = "batch-1"
MIG = {"mig": {"3g.40gb": 1, "1g.10gb": 2}}


def prepare(ledger, to_do, run_id="run-1"):
    claim, _ = take(ledger, run_id, "prepare", frozenset())
    in_ledger.record(claim, BATCH, {}, 10)
    claim.finish("done", "made by the test", {"batch_id": BATCH, "to_do": to_do})


def work_on_the_batch(ledger, run_id, process=None):
    """The claim of the run's stage `run`, once it writes to the batch."""
    claim, _ = take(ledger, run_id, "run", frozenset(), process)
    assert in_ledger.become_writer(claim, BATCH) is None
    return claim


def held(ledger):
    return [(lease.run_id, lease.devices) for lease in leases.live_leases(ledger)]


def slot_uuids(result):
    return [slot["stands_for"]["uuid"] for slot in result.facts["slots"]]
