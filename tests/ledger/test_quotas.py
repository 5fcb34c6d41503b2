"""What a tenant may hold at once and take of a day, counted over all nodes when a lease is taken."""

import contextlib
import threading

import psycopg
import pytest

from tasks.errors import Busy, InputError
from tasks.ledger import leases, quotas, take
from tasks.settings import Quota, Settings
from tests.runs import a_run, open_ledger

HOUR = 3600.0


@pytest.fixture
def claim_of(ledger):
    """The claim of a tenant's run on `provision`."""

    def claim(run_id, tenant="prod", on=None):
        a_run(on or ledger, run_id, tenant=tenant)
        return take(on or ledger, run_id, "provision", frozenset())[0]

    return claim


def lease(claim, node, devices, quota, tenant="prod"):
    return leases.take(claim, node, devices, HOUR, tenant, quota)


def test_devices_are_counted_over_all_nodes_and_other_tenants_are_not(claim_of):
    three = Quota(devices=3)
    lease(claim_of("a"), "dgx-1", ["0", "1"], three)
    lease(claim_of("other", "dev"), "dgx-1", ["2", "3"], three, "dev")
    with pytest.raises(Busy, match=r"tenant prod holds 2 device.* the 2 that this run wants .* quota of 3"):
        lease(claim_of("b"), "dgx-2", ["0", "1"], three)
    assert lease(claim_of("c"), "dgx-2", ["0"], three).devices == ("0",)


def test_a_run_keeps_and_renews_what_it_holds_whatever_the_quota_is_now(claim_of):
    claim = claim_of("a")
    first = lease(claim, "dgx-1", ["0", "1"], None)
    assert lease(claim, "dgx-1", ["0", "1"], Quota(devices=1)).lease_id == first.lease_id


def test_devices_that_are_given_back_can_be_taken_again(claim_of):
    claim, one = claim_of("a"), Quota(devices=1)
    leases.release(claim, lease(claim, "dgx-1", ["0"], one).lease_id, "done")
    assert lease(claim_of("b"), "dgx-1", ["1"], one)


def test_hours_are_those_of_the_last_24_and_released_leases_count(claim_of, database_url):
    claim, hours = claim_of("a"), Quota(device_hours_per_day=10)
    taken = lease(claim, "dgx-1", ["0", "1"], hours)
    leases.release(claim, taken.lease_id, "done")
    with psycopg.connect(database_url, autocommit=True) as admin:

        def it_was(began, ended):
            with admin.transaction():
                admin.execute("select set_config('ledger.acting', 'test', true)")
                admin.execute(
                    "update ledger.lease set taken_at = clock_timestamp() - %s::interval, "
                    "released_at = clock_timestamp() - %s::interval where lease_id = %s",
                    [began, ended, taken.lease_id],
                )

        it_was("8 hours", "2 hours")  # two devices: 12 of them
        with pytest.raises(Busy, match=r"has taken 12\.0 device hours of the last 24, and its quota is 10"):
            lease(claim_of("b"), "dgx-1", ["0"], hours)
        it_was("30 hours", "22 hours")  # 4 of them are older than a day ago
        assert lease(claim_of("c"), "dgx-1", ["0"], hours)


def test_two_runs_at_once_are_not_both_the_last_that_fits(claim_of, ledger, database_url):
    claims = []
    for number in range(6):
        claims.append(claim_of(f"run-{number}", on=open_ledger(database_url)))
    got = []

    def try_it(number):
        with contextlib.suppress(Busy):
            got.append(lease(claims[number], f"dgx-{number}", ["0"], Quota(devices=2)))

    threads = [threading.Thread(target=try_it, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for claim in claims:
        claim.ledger.close()
    assert len(got) == 2


def test_who_is_over_the_quota_is_told_before_it_stands_in_line(claim_of):
    one = Quota(devices=1)
    lease(claim_of("a"), "dgx-1", ["0"], one)
    with pytest.raises(Busy, match="quota of 1"):
        quotas.refuse_over_quota(claim_of("b"), "prod", one, 1)
    quotas.refuse_over_quota(claim_of("c"), "prod", None, 1)


def test_who_wants_more_than_the_whole_quota_is_refused_and_does_not_wait(claim_of):
    two = Quota(devices=2)
    for refusing in (
        lambda: quotas.refuse_over_quota(claim_of("a"), "prod", two, 3),
        lambda: lease(claim_of("b"), "dgx-1", ["0", "1", "2"], two),
    ):
        with pytest.raises(
            InputError, match=r"layout\.gpus: .* wants 3 device.* tenant prod may hold 2 at once"
        ):
            refusing()


def test_a_tenant_that_is_not_named_has_the_quota_of_all_others(tmp_path):
    settings = Settings(home=tmp_path, quotas={"prod": Quota(devices=8), "*": Quota(devices=1)})
    assert settings.quota_of("prod") == Quota(devices=8)
    assert settings.quota_of("dev") == Quota(devices=1)
    assert Settings(home=tmp_path).quota_of("prod") is None


def a_segment(database_url, claim, path, tokens, began, ended):
    """Rows that cost `tokens`, registered between two moments ago."""
    with psycopg.connect(database_url) as owner:
        for table in ("batch", "segment"):
            owner.execute(f"alter table ledger.{table} disable trigger user")
        owner.execute("insert into ledger.batch values ('b', '{}', 9) on conflict do nothing")
        owner.execute(
            "insert into ledger.segment (batch_id, path, run_id, epoch, start_byte, stop_byte, rows, tokens, "
            "first_registered_at, last_registered_at) values ('b', %s, %s, %s, 0, 1, 1, %s, "
            "clock_timestamp() - %s::interval, clock_timestamp() - %s::interval)",
            [path, claim.run_id, claim.epoch, tokens, began, ended],
        )
        for table in ("batch", "segment"):
            owner.execute(f"alter table ledger.{table} enable trigger user")


def test_tokens_are_those_of_the_last_24_hours_over_all_runs_of_the_tenant(claim_of, ledger, database_url):
    spent = Quota(tokens_per_day=1000)
    first, second = claim_of("a"), claim_of("b")
    a_segment(database_url, first, "1", 400, "3 hours", "2 hours")
    a_segment(database_url, first, "old", 5000, "60 hours", "30 hours")
    a_segment(database_url, second, "2", 500, "0", "0")
    a_segment(database_url, claim_of("other", "dev"), "3", 900, "1 hour", "1 hour")
    assert not quotas.tokens_are_spent(ledger, "prod", spent)
    assert lease(claim_of("c"), "dgx-1", ["0"], spent)
    # Half of its time is older than a day, and so is half of what it cost.
    a_segment(database_url, second, "half", 400, "36 hours", "12 hours")
    assert quotas.tokens_are_spent(ledger, "prod", spent)
    with pytest.raises(Busy, match=r"has spent 1,100 tokens in the last 24 hours, and its quota is 1,000"):
        lease(claim_of("d"), "dgx-1", ["1"], spent)
    assert not quotas.tokens_are_spent(ledger, "prod", Quota(devices=1))
