"""Restore: the node's layout as it was before this run, then the end of the run's lease.

Keeps: a lease is not released while a process of the run's pool lives, because its devices would be given to
another run under it. In this version `provision` changes no layout, so there is none to bring back.
"""

from dataclasses import dataclass

from tasks.contract import Context, Outcome
from tasks.errors import StageFailed
from tasks.gpu.provision import refuse_other_node
from tasks.ledger import leases
from tasks.ledger.leases import Lease
from tasks.node import processes
from tasks.node.processes import Process


@dataclass(frozen=True)
class Plan:
    """The lease to end, if there is one."""

    lease: Lease | None
    reason: str

    @property
    def satisfied(self) -> bool:
        """Whether this run holds nothing on the node."""
        return self.lease is None


def plan(context: Context) -> Plan:
    """The lease that this run still has here, expired or not.

    Raises:
        InputError: this is not the spec's node.
    """
    refuse_other_node(context.run.spec, context.settings)
    node = context.settings.node
    lease = leases.lease_of(context.claim.ledger, context.run.run_id, node)
    if lease is None:
        return Plan(None, f"this run holds no lease on {node}")
    return Plan(lease, f"end lease {lease.lease_id} on {', '.join(lease.devices)} of {node}")


def apply(plan: Plan, context: Context) -> None:
    """Release the lease.

    Raises:
        StageFailed: the pool is not stopped.
    """
    assert plan.lease is not None, "apply is not called for a satisfied plan"
    living = _pool_of(context, len(plan.lease.devices))
    if living:
        pids = ", ".join(str(process.pid) for process in living)
        raise StageFailed(
            f"process(es) {pids} of this run's pool still live on {', '.join(plan.lease.devices)}: end them "
            f"with `qwen-pipeline stop` first; the lease stays until then"
        )
    leases.release(context.claim, plan.lease.lease_id, "restored")


def verify(context: Context) -> Outcome:
    """That no lease is left.

    Raises:
        StageFailed: there is one.
    """
    left = leases.lease_of(context.claim.ledger, context.run.run_id, context.settings.node)
    if left is not None:
        raise StageFailed(
            f"lease {left.lease_id} of run {left.run_id} is still there after restore: something of this run "
            f"took it again; stop that, then restore again"
        )
    return Outcome(
        f"run {context.run.run_id} holds nothing on {context.settings.node}; no layout was changed, so "
        f"there is none to restore"
    )


def _pool_of(context: Context, most_workers: int) -> list[Process]:
    names = ["keeper", *(f"worker-{number}" for number in range(most_workers))]
    deployment = context.settings.deployment
    found = (processes.find(f"{context.run.run_id}/{name}", deployment) for name in names)
    return sorted({process for each in found for process in each})
