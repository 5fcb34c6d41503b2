"""Quotas: what the runs of one tenant may hold at once, and take of a day.

Checked when a lease is taken; a run that has its devices keeps them. A tenant that is over its quota is busy, not
wrong: its runs wait until others of it have ended, and meanwhile do not stand in anybody's way. A run that alone wants
more than the quota would wait for ever, and is refused. Tokens are counted
while rows are asked, too: a run can spend more of them in an hour than its tenant has for the day.
"""

from tasks.errors import Busy, InputError
from tasks.ledger.claims import Claim
from tasks.ledger.connection import Connection, Ledger
from tasks.settings import Quota


def refuse_over_quota(claim: Claim, tenant: str, quota: Quota | None, wanted: int) -> None:
    """For a run that is about to stand in line.

    Raises:
        Busy: with `wanted` devices more the tenant would be over its quota; says what it holds.
        InputError: `wanted` alone is more than the quota.
    """
    if quota is not None:
        with claim.ledger.transaction() as connection:
            check(connection, claim.ledger, tenant, quota, wanted)


def check(connection: Connection, ledger: Ledger, tenant: str, quota: Quota, wanted: int) -> None:
    """The same within the transaction that takes the lease, so that two runs cannot both be the last to fit.

    Raises:
        Busy, InputError: see above.
    """
    refuse_more_than_all(tenant, quota, wanted)
    queries = ledger.queries
    queries.lock_tenant(connection, tenant=tenant)
    if quota.devices is not None:
        held = queries.devices_of_tenant(connection, tenant=tenant)
        if held + wanted > quota.devices:
            raise Busy(
                f"tenant {tenant} holds {held} device(s), and with the {wanted} that this run wants it would be over "
                f"its quota of {quota.devices}: the run waits until another one of the tenant has ended "
                f"(QWEN_PIPELINE_QUOTAS)"
            )
    if quota.device_hours_per_day is not None:
        taken = queries.device_hours_of_tenant(connection, tenant=tenant)
        if taken >= quota.device_hours_per_day:
            raise Busy(
                f"tenant {tenant} has taken {taken:.1f} device hours of the last 24, and its quota is "
                f"{quota.device_hours_per_day:g}: the run waits until some of them are older "
                f"(QWEN_PIPELINE_QUOTAS)"
            )
    if quota.tokens_per_day is not None:
        spent = queries.tokens_of_tenant(connection, tenant=tenant)
        if spent >= quota.tokens_per_day:
            raise Busy(
                f"tenant {tenant} has spent {spent:,} tokens in the last 24 hours, and its quota is "
                f"{quota.tokens_per_day:,}: the run waits until some of them are older "
                f"(QWEN_PIPELINE_QUOTAS)"
            )


def refuse_more_than_all(tenant: str, quota: Quota, wanted: int) -> None:
    """What no waiting can give.

    Raises:
        InputError: `wanted` alone is more devices than the tenant may hold.
    """
    if quota.devices is not None and wanted > quota.devices:
        raise InputError(
            f"layout.gpus: the layout wants {wanted} device(s), and tenant {tenant} may hold {quota.devices} at once "
            f"(QWEN_PIPELINE_QUOTAS): ask for fewer GPUs, or have the quota raised (a layout of CPU cores takes all)"
        )


def tokens_are_spent(ledger: Ledger, tenant: str, quota: Quota | None) -> bool:
    """Whether the tenant's runs have spent the tokens of the last 24 hours."""
    if quota is None or quota.tokens_per_day is None:
        return False
    with ledger.transaction() as connection:
        return bool(ledger.queries.tokens_of_tenant(connection, tenant=tenant) >= quota.tokens_per_day)
