"""Leases: a run's durable claim on devices of a node, with an expiry in the database's time.

Keeps:
- a device of a node is in at most one live lease, and a run has at most one live lease on a node (unique indexes);
- an expired or abandoned lease is still live: processes may still sit on its devices. The same run may come back
  for it; anybody else is busy until restore or the reaper has ended those processes and released it;
- every write is under a claim of the run that the lease belongs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tasks.errors import Busy, StageFailed
from tasks.ledger.claims import Claim
from tasks.ledger.connection import Ledger

_ATTEMPTS = 5
"""A holder may go away between our try and our question who it is."""


@dataclass(frozen=True)
class Lease:
    """A live lease, as the ledger held it a moment ago."""

    lease_id: int
    run_id: str
    node: str
    devices: tuple[str, ...]
    """`cpu:CORE` or a GPU's UUID, sorted."""
    state: Literal["held", "abandoned"]
    reason: str | None
    """Why it was abandoned."""
    taken_at: datetime
    expires_at: datetime
    left_s: float
    """Until its expiry, by the database's clock when this was read; negative when expired."""

    @property
    def is_over(self) -> bool:
        """Whether the reaper may end what it covers."""
        return self.state == "abandoned" or self.left_s <= 0


def take(claim: Claim, node: str, devices: Sequence[str], lease_s: float) -> Lease:
    """Lease `devices` of `node` to the claim's run for `lease_s` seconds from now.

    A run that has a lease on them already gets that one, held again and renewed.

    Raises:
        Busy: another run holds one of the devices; the message names it and when its lease expires.
        StageFailed: this run holds a lease on other devices of the node.
        Fenced: the claim has ended.
    """
    for _ in range(_ATTEMPTS):
        lease = _try_to_take(claim, node, tuple(sorted(set(devices))), lease_s)
        if lease is not None:
            return lease
    raise Busy(
        f"devices {', '.join(sorted(set(devices)))} of {node} change hands faster than they can be taken; try again"
    )


def renew(claim: Claim, lease_id: int, lease_s: float) -> datetime:
    """Let the lease expire `lease_s` seconds from now, never earlier than it would; returns when that is.

    Raises:
        StageFailed: the lease is not held any more, so its devices must not be used.
        Fenced: the claim has ended.
    """
    with claim.writing() as connection:
        queries = claim.ledger.queries
        expires_at = queries.renew_lease(connection, lease_id=lease_id, run_id=claim.run_id, lease_s=lease_s)
        if expires_at is None:
            ended = queries.why_lease_ended(connection, lease_id=lease_id) or {
                "state": "unknown",
                "reason": None,
            }
            raise StageFailed(
                f"lease {lease_id} is not held by run {claim.run_id} any more ({ended['state']}: "
                f"{ended['reason'] or 'no reason recorded'}); its devices must not be used, take a lease anew"
            )
        assert isinstance(expires_at, datetime)
        return expires_at


def release(claim: Claim, lease_id: int, reason: str) -> None:
    """Give the devices back; nothing happens when that was done before.

    The caller has made sure that no process of the run uses them.

    Raises:
        Fenced: the claim has ended.
    """
    with claim.writing() as connection:
        claim.ledger.queries.release_lease(connection, lease_id=lease_id, run_id=claim.run_id, reason=reason)


def abandon(claim: Claim, lease_id: int, reason: str) -> None:
    """Mark a live lease as one that nobody works under: the reaper's next tick ends it, before its expiry.

    Raises:
        Fenced: the claim has ended.
    """
    with claim.writing() as connection:
        claim.ledger.queries.abandon_lease(connection, lease_id=lease_id, run_id=claim.run_id, reason=reason)


def release_if_over(claim: Claim, lease_id: int, reason: str) -> bool:
    """Release an expired or abandoned lease; False when it was renewed or released meanwhile.

    For the reaper, which acts under a claim `reap` of the lease's run, after it has ended the run's processes.

    Raises:
        Fenced: the claim has ended.
    """
    with claim.writing() as connection:
        released = claim.ledger.queries.release_lease_that_is_over(
            connection, lease_id=lease_id, run_id=claim.run_id, reason=reason
        )
    return bool(released == 1)


def live_leases(ledger: Ledger, node: str | None = None) -> list[Lease]:
    """The live leases of `node`, or of all nodes, oldest first."""
    with ledger.transaction() as connection:
        rows = ledger.queries.live_leases(connection, node=node, run_id=None)
        return [_lease(row) for row in rows]


def lease_of(ledger: Ledger, run_id: str, node: str) -> Lease | None:
    """The run's live lease on `node`, expired or not; None when it has none."""
    with ledger.transaction() as connection:
        rows = list(ledger.queries.live_leases(connection, node=node, run_id=run_id))
    return _lease(rows[0]) if rows else None


def _try_to_take(claim: Claim, node: str, devices: tuple[str, ...], lease_s: float) -> Lease | None:
    """None when the devices were held, but by nobody a moment later."""
    queries = claim.ledger.queries
    with claim.writing() as connection:
        # A live claim per stage, so two stages of one run could come here at once: the unique index decides.
        own = [_lease(row) for row in queries.live_leases(connection, node=node, run_id=claim.run_id)]
        if own and own[0].devices != devices:
            raise StageFailed(
                f"run {claim.run_id} holds lease {own[0].lease_id} on {', '.join(own[0].devices)} of {node} and now "
                f"wants {', '.join(devices)}: end that one first with `qwen-pipeline stop` and `restore`"
            )
        if own:
            queries.hold_again(connection, lease_id=own[0].lease_id, run_id=claim.run_id, lease_s=lease_s)
        else:
            lease_id = queries.insert_lease(connection, run_id=claim.run_id, node=node, lease_s=lease_s)
            got = queries.insert_lease_devices(
                connection, lease_id=lease_id, node=node, devices=list(devices)
            )
            if got != len(devices):
                holders = list(
                    queries.holders_of_devices(
                        connection, node=node, devices=list(devices), run_id=claim.run_id
                    )
                )
                raise _TakenByOthers(holders)
        return _lease(next(iter(queries.live_leases(connection, node=node, run_id=claim.run_id))))
