"""What the stages before `start` hand on: whether workers are needed, the release, the slots and their lease."""

from pathlib import Path
from typing import Any

from tasks import contract
from tasks.contract import Context
from tasks.errors import InputError, StageFailed
from tasks.ledger import leases
from tasks.ledger.claims import facts_of
from tasks.ledger.leases import Lease
from tasks.serving.launch import Slot
from tasks.serving.pools import Wanted


def why_no_pool(context: Context) -> str | None:
    """Why no worker is needed; None when some are.

    Raises:
        InputError: the rows of the run's batch have not been counted.
    """
    if not context.run.spec.batch.is_none:
        _facts(context, "prepare")
    return contract.why_no_pool(context)


def wanted(context: Context) -> Wanted:
    """The pool that serves the release on the devices that the run was given.

    Raises:
        InputError: a stage before this one has not succeeded.
        StageFailed: there are no devices.
    """
    release, devices = _facts(context, "convert"), _facts(context, "provision")
    slots = tuple(Slot.from_facts(slot) for slot in devices["slots"])
    if not slots:
        raise StageFailed("provision handed on no slot although rows are left to do: run provision again")
    return Wanted(release["release_id"], Path(release["path"]), slots, devices["lease_id"])


def why_lease_is_over(wanted: Wanted, context: Context) -> str | None:
    """As `was abandoned`, when this run must hold its lease again before its devices are used.

    Raises:
        StageFailed: see `hold_lease`.
    """
    lease = _lease(wanted, context)
    if lease is None or not lease.is_over:
        return None
    return "was abandoned" if lease.state == "abandoned" else "expired"


def hold_lease(wanted: Wanted, context: Context) -> None:
    """Hold the devices' lease from now on, also when the run has let it expire or abandoned it.

    Raises:
        StageFailed: the devices were given back; others may have them by now.
    """
    lease, settings = _lease(wanted, context), context.settings
    if lease is not None:
        leases.take(context.claim, settings.node, lease.devices, settings.lease_s)


def _lease(wanted: Wanted, context: Context) -> Lease | None:
    """None where no device is leased."""
    if wanted.lease_id is None:
        return None
    run_id, node = context.run.run_id, context.settings.node
    lease = leases.lease_of(context.claim.ledger, run_id, node)
    if lease is None or lease.lease_id != wanted.lease_id:
        raise StageFailed(
            f"the devices that run {run_id} was given on {node} (lease {wanted.lease_id}) were given back since: "
            f"run `qwen-pipeline provision` again, then start"
        )
    return lease


def _facts(context: Context, stage: str) -> dict[str, Any]:
    facts = facts_of(context.claim.ledger, context.run.run_id, stage)
    if facts is None:
        raise InputError(
            f"stage start needs what stage {stage} found, and {stage} has not succeeded in run "
            f"{context.run.run_id}: run `qwen-pipeline {stage}` first"
        )
    return facts
