"""Leases: a run's durable claim on devices of a node, with an expiry in the database's time.

Keeps:
- a device of a node is in at most one live lease, and a run has at most one live lease on a node (unique
  indexes);
- an expired or abandoned lease is still live: processes may still sit on its devices. The same run may come
  back for it; anybody else is busy until restore or the reaper has ended those processes and released it;
- runs that want the same devices get them in order of arrival: a run that waits keeps its place in line by
  asking again, and nobody takes a device that one before it may take;
- every write is under a claim of the run that the lease belongs to.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from psycopg.errors import UniqueViolation

from tasks.errors import Busy, StageFailed
from tasks.ledger import quotas
from tasks.ledger.claims import Claim
from tasks.ledger.connection import Ledger
from tasks.settings import Quota

_ATTEMPTS = 5
"""A holder may go away before we ask who it is, and two stages of one run may take its lease at once."""


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


def take(
    claim: Claim,
    node: str,
    devices: Sequence[str],
    lease_s: float,
    tenant: str = "",
    quota: Quota | None = None,
) -> Lease:
    """Lease `devices` of `node` to the claim's run for `lease_s` seconds from now.

    A run that has a lease on them already gets that one, held again and renewed.

    Args:
        quota: of `tenant`, whose run it is; a lease that the run has already is its own.

    Raises:
        Busy: another run holds one of the devices; the message names it and when its lease expires. Or the
            tenant would be over its quota.
        StageFailed: this run holds a lease on other devices of the node.
        Fenced: the claim has ended.
    """
    wanted = tuple(sorted(set(devices)))
    for _ in range(_ATTEMPTS):
        with suppress(_ChangedHands, UniqueViolation):
            return _try_to_take(claim, node, wanted, lease_s, tenant, quota)
    raise Busy(f"{', '.join(wanted)} of {node} change hands faster than they can be taken; try again")


@dataclass(frozen=True)
class Place:
    """Where a run stands in line for devices of a node."""

    number: int
    """1: nobody is before it."""
    behind: tuple[str, ...]
    """The runs before it, the first one first."""


def stand_in_line(claim: Claim, node: str, devices: Sequence[str], place_s: float) -> Place:
    """Get in line for devices of `node`, or keep the place for another `place_s` seconds.

    Args:
        devices: all that the run may take, however many of them it wants.

    Raises:
        Fenced: the claim has ended.
    """
    run = {"node": node, "run_id": claim.run_id}
    wanted = sorted(set(devices))
    with claim.writing() as connection:
        queries = claim.ledger.queries
        queries.lock_line(connection, node=node)
        queries.keep_place(connection, **run, devices=wanted, place_s=place_s)
        ahead = tuple(row["run_id"] for row in queries.ahead_in_line(connection, **run, devices=wanted))
    return Place(len(ahead) + 1, ahead)


def leave_line(claim: Claim, node: str) -> None:
    """Give the place in line up.

    Raises:
        Fenced: the claim has ended.
    """
    with claim.writing() as connection:
        claim.ledger.queries.leave_line(connection, run_id=claim.run_id, node=node)


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


def _try_to_take(
    claim: Claim, node: str, devices: tuple[str, ...], lease_s: float, tenant: str, quota: Quota | None
) -> Lease:
    queries = claim.ledger.queries
    run = {"node": node, "run_id": claim.run_id}
    with claim.writing() as connection:
        own = [_lease(row) for row in queries.live_leases(connection, **run)]
        if own and own[0].devices != devices:
            raise StageFailed(
                f"run {claim.run_id} holds lease {own[0].lease_id} on {', '.join(own[0].devices)} of {node} "
                f"and now wants {', '.join(devices)}: end that one first with `qwen-pipeline stop` and "
                f"`restore`"
            )
        if own:
            queries.hold_again(connection, lease_id=own[0].lease_id, run_id=claim.run_id, lease_s=lease_s)
        else:
            ahead = [row["run_id"] for row in queries.ahead_in_line(connection, **run, devices=list(devices))]
            if ahead:
                raise Busy(
                    f"{', '.join(devices)} of {node}: {len(ahead)} run(s) wait before this one, first {ahead[0]}; "
                    f"try again, the place in line is kept for a while"
                )
            if quota is not None:
                quotas.check(connection, claim.ledger, tenant, quota, len(devices))
            lease_id = queries.insert_lease(connection, **run, lease_s=lease_s)
            wanted = {"lease_id": lease_id, "node": node, "devices": list(devices)}
            if queries.insert_lease_devices(connection, **wanted) != len(devices):
                raise _held_by_others(node, list(queries.holders_of_devices(connection, **wanted)))
        queries.leave_line(connection, **run)
        (row,) = queries.live_leases(connection, **run)
        return _lease(row)


class _ChangedHands(Exception):
    """Somebody held what we wanted, but no longer when we asked who."""


def _held_by_others(node: str, holders: list[dict[str, Any]]) -> Exception:
    if not holders:
        return _ChangedHands()
    lines = [
        f"{', '.join(holder['devices'])} of {node} {'are' if len(holder['devices']) > 1 else 'is'} leased to "
        f"run {holder['run_id']} {_until(holder)}"
        for holder in holders
    ]
    return Busy("; ".join(lines) + "; try again when that has ended (`qwen-pipeline status` shows it)")


def _until(holder: dict[str, Any]) -> str:
    when = f"{holder['expires_at']:%Y-%m-%d %H:%M:%S} UTC"
    if holder["state"] == "abandoned":
        return "(abandoned; `qwen-pipeline reap` frees it)"
    if holder["expired"]:
        return f"(expired at {when}, not released yet; `qwen-pipeline reap` frees it)"
    return f"until {when}"


def _lease(row: dict[str, Any]) -> Lease:
    return Lease(**{**row, "devices": tuple(row["devices"])})
