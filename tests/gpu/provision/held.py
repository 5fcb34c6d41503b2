"""What a run holds, and what it is to hold."""

from tasks.ledger import leases, take

MIG = {"mig": {"3g.40gb": 1, "1g.10gb": 2}}


def prepare(ledger, to_do, run_id="run-1"):
    claim, _ = take(ledger, run_id, "prepare", frozenset())
    claim.finish("done", "made by the test", {"to_do": to_do})


def held(ledger):
    return [(lease.run_id, lease.devices) for lease in leases.live_leases(ledger)]


def slot_uuids(result):
    return [slot["stands_for"]["uuid"] for slot in result.facts["slots"]]
