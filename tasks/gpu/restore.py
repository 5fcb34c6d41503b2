"""Restore: the node's layout as it was before this run, then the end of the run's lease.

Keeps: a lease is not released while a process of the run's pool lives, because its devices would be given to
another run under it, nor while something of the old layout is missing: that is recorded, the lease stays, and a
later try brings the rest back.
"""

from dataclasses import dataclass

from tasks.contract import Context, Outcome
from tasks.errors import StageFailed
from tasks.gpu import cutting
from tasks.ledger import Claim, leases
from tasks.ledger.leases import Lease
from tasks.node import processes
from tasks.node.processes import Process
from tasks.settings import Settings


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
    """The lease that this run still has here, expired or not."""
    node = context.settings.node
    lease = leases.lease_of(context.claim.ledger, context.run.run_id, node)
    if lease is None:
        return Plan(None, f"this run holds no lease on {node}")
    return Plan(lease, f"end lease {lease.lease_id} on {', '.join(lease.devices)} of {node}")


def apply(plan: Plan, context: Context) -> None:
    """Bring the layout back, then release the lease.

    Raises:
        StageFailed: the pool is not stopped, or something of the old layout is missing.
    """
    assert plan.lease is not None, "apply is not called for a satisfied plan"
    living = _pool_of(context)
    if living:
        pids = ", ".join(str(process.pid) for process in living)
        raise StageFailed(
            f"process(es) {pids} of this run's pool still live on {', '.join(plan.lease.devices)}: end them "
            f"with `qwen-pipeline stop` first; the lease stays until then"
        )
    give_back(context.claim, context.settings, plan.lease, "restored")


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
    leases.leave_line(context.claim, context.settings.node)
    return Outcome(
        f"run {context.run.run_id} holds nothing on {context.settings.node}, and the layout of its GPUs is as it was"
    )


def give_back(claim: Claim, settings: Settings, lease: Lease, reason: str) -> list[str]:
    """Bring the layout of the lease's GPUs back and release it; returns what was done, in words.

    The caller has made sure that no process of the run uses them.

    Raises:
        StageFailed: something of the old layout is missing; it is recorded, and the lease stays for a later try.
        Busy: somebody else cuts the node's GPUs at this moment.
    """
    done, missing = cutting.bring_back(claim, settings, lease)
    if missing:
        partial = f"the layout is restored only in part: {'; '.join(missing)}"
        leases.abandon(claim, lease.lease_id, partial)
        raise StageFailed(
            f"{partial}. Lease {lease.lease_id} stays until a later try of `qwen-pipeline restore` or `reap` has "
            f"brought the rest back"
        )
    leases.release(claim, lease.lease_id, reason)
    return done


def _pool_of(context: Context) -> list[Process]:
    """By their marks, and by the ledger: a process that hangs in its end has no environment any more."""
    run_id, ledger = context.run.run_id, context.claim.ledger
    pool = (f"{run_id}/keeper", f"{run_id}/worker-")
    found = processes.find(run_id, context.settings.deployment)
    marked = {process for process in found if (processes.part_of(process) or "").startswith(pool)}
    with ledger.transaction() as connection:
        rows = list(ledger.queries.pool_processes_of_run(connection, run_id=run_id))
    known = (Process(row["pid"], row["start_ticks"], row["boot_id"], row["host"]) for row in rows)
    return sorted(marked.union(*(processes.session_of(leader) for leader in known)))
