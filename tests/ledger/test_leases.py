"""Devices of a node belong to one run at a time, until somebody has made sure that they are free."""

import threading
from datetime import timedelta

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tasks.errors import Busy, Fenced, StageFailed
from tasks.ledger import leases, take
from tests.runs import SQL, a_run, open_ledger, outputs, python

NODE = "dgx-1"
HOUR = 3600.0

TAKE_AND_SAY = """
import sys
from pathlib import Path
from tasks.errors import Busy
from tasks.ledger import Ledger, leases, take
url, sql, run_id, *devices = sys.argv[1:]
with Ledger(url, Path(sql)) as ledger:
    claim, _ = take(ledger, run_id, "provision", frozenset())
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        print(leases.take(claim, "dgx-1", devices, 60).run_id)
    except Busy as busy:
        print("busy:", busy)
"""


@pytest.fixture
def claim_of(ledger):
    """The claim of a run on `provision`."""

    def claim(run_id):
        a_run(ledger, run_id)
        return take(ledger, run_id, "provision", frozenset())[0]

    return claim


@pytest.fixture
def clock(database_url):
    """Let leases expire: their time is the database's, so a test moves their expiry and not a clock."""
    with psycopg.connect(database_url, autocommit=True) as admin:

        def let_expire(lease):
            with admin.transaction():
                admin.execute("select set_config('ledger.acting', 'test', true)")
                admin.execute(
                    "update ledger.lease set expires_at = clock_timestamp() - interval '1 second' "
                    "where lease_id = %s",
                    [lease.lease_id],
                )

        yield let_expire


def test_a_lease_names_run_node_devices_and_expiry(ledger, claim_of):
    lease = leases.take(claim_of("a"), NODE, ["cpu:1", "cpu:0"], HOUR)
    assert (lease.run_id, lease.node, lease.devices, lease.state) == ("a", NODE, ("cpu:0", "cpu:1"), "held")
    assert HOUR - 60 < lease.left_s <= HOUR
    assert timedelta(seconds=HOUR - 60) < lease.expires_at - lease.taken_at < timedelta(seconds=HOUR + 60)
    assert [found.lease_id for found in leases.live_leases(ledger, NODE)] == [lease.lease_id]
    assert leases.live_leases(ledger, "dgx-2") == []


def test_a_device_is_leased_to_one_run_and_who_comes_later_is_told_to_whom_and_until_when(claim_of):
    lease = leases.take(claim_of("a"), NODE, ["cpu:0", "cpu:1"], HOUR)
    other = claim_of("b")
    until = f"{lease.expires_at:%Y-%m-%d %H:%M:%S} UTC"
    with pytest.raises(Busy, match=rf"cpu:1 of {NODE} is leased to run a until {until}"):
        leases.take(other, NODE, ["cpu:1", "cpu:2"], HOUR)
    # Nothing of what was free is kept.
    assert leases.take(claim_of("c"), NODE, ["cpu:2"], HOUR).devices == ("cpu:2",)


def test_runs_share_a_node_and_devices_of_other_nodes_have_the_same_names(claim_of):
    assert leases.take(claim_of("a"), NODE, ["cpu:0"], HOUR)
    assert leases.take(claim_of("b"), NODE, ["cpu:1"], HOUR)
    assert leases.take(claim_of("c"), "dgx-2", ["cpu:0"], HOUR)


def test_a_run_that_takes_again_gets_its_own_lease_renewed(claim_of):
    claim = claim_of("a")
    first = leases.take(claim, NODE, ["cpu:0"], 60)
    again = leases.take(claim, NODE, ["cpu:0"], HOUR)
    assert again.lease_id == first.lease_id
    assert again.expires_at > first.expires_at
    assert leases.take(claim, NODE, ["cpu:0"], 1).expires_at >= again.expires_at  # never shortened


def test_a_run_cannot_change_the_devices_of_its_lease(claim_of):
    claim = claim_of("a")
    leases.take(claim, NODE, ["cpu:0"], HOUR)
    with pytest.raises(StageFailed, match=r"holds lease \d+ on cpu:0 .* wants cpu:0, cpu:1.*restore"):
        leases.take(claim, NODE, ["cpu:0", "cpu:1"], HOUR)


def test_an_expired_lease_is_nobody_elses_until_it_is_released(ledger, claim_of, clock):
    lease = leases.take(claim_of("a"), NODE, ["cpu:0"], HOUR)
    clock(lease)
    other = claim_of("b")
    with pytest.raises(
        Busy, match=r"run a \(expired at .*, not released yet; `qwen-pipeline reap` frees it\)"
    ):
        leases.take(other, NODE, ["cpu:0"], HOUR)
    assert leases.lease_of(ledger, "a", NODE).is_over
    leases.release(take(ledger, "a", "reap", frozenset())[0], lease.lease_id, "expired")
    assert leases.take(other, NODE, ["cpu:0"], HOUR).run_id == "b"


def test_a_run_comes_back_for_its_expired_lease(claim_of, clock):
    claim = claim_of("a")
    lease = leases.take(claim, NODE, ["cpu:0"], HOUR)
    clock(lease)
    again = leases.take(claim, NODE, ["cpu:0"], HOUR)
    assert (again.lease_id, again.is_over) == (lease.lease_id, False)


def test_an_abandoned_lease_is_over_before_its_expiry_and_is_not_renewed(ledger, claim_of):
    claim = claim_of("a")
    lease = leases.take(claim, NODE, ["cpu:0"], HOUR)
    leases.abandon(claim, lease.lease_id, "start failed")
    found = leases.lease_of(ledger, "a", NODE)
    assert (found.state, found.reason, found.is_over) == ("abandoned", "start failed", True)
    with pytest.raises(StageFailed, match=r"not held by run a any more \(abandoned: start failed\)"):
        leases.renew(claim, lease.lease_id, HOUR)
    with pytest.raises(Busy, match="run a \\(abandoned; `qwen-pipeline reap` frees it\\)"):
        leases.take(claim_of("b"), NODE, ["cpu:0"], HOUR)


def test_a_renewed_lease_expires_later_and_is_not_over(ledger, claim_of, clock):
    claim = claim_of("a")
    lease = leases.take(claim, NODE, ["cpu:0"], 60)
    clock(lease)
    assert leases.renew(claim, lease.lease_id, HOUR) > lease.expires_at
    assert not leases.lease_of(ledger, "a", NODE).is_over


def test_a_released_lease_frees_its_devices_and_stays_released(ledger, claim_of):
    claim = claim_of("a")
    lease = leases.take(claim, NODE, ["cpu:0"], HOUR)
    leases.release(claim, lease.lease_id, "restored")
    leases.release(claim, lease.lease_id, "restored again")
    leases.abandon(claim, lease.lease_id, "too late")
    assert leases.lease_of(ledger, "a", NODE) is None
    with pytest.raises(StageFailed, match=r"\(released: restored\)"):
        leases.renew(claim, lease.lease_id, HOUR)
    assert leases.take(claim_of("b"), NODE, ["cpu:0"], HOUR)
    with pytest.raises(Busy):
        leases.take(claim, NODE, ["cpu:0"], HOUR)


def test_a_run_cannot_touch_the_lease_of_another(ledger, claim_of):
    lease = leases.take(claim_of("a"), NODE, ["cpu:0"], HOUR)
    other = claim_of("b")
    leases.release(other, lease.lease_id, "mine now")
    leases.abandon(other, lease.lease_id, "not mine")
    with pytest.raises(StageFailed, match="not held by run b"):
        leases.renew(other, lease.lease_id, HOUR)
    assert leases.lease_of(ledger, "a", NODE).state == "held"


def test_an_old_holder_cannot_take_renew_or_release(ledger, claim_of):
    old = claim_of("a")
    lease = leases.take(old, NODE, ["cpu:0"], HOUR)
    take(ledger, "a", "provision", frozenset())
    for act in (
        lambda: leases.take(old, NODE, ["cpu:0"], HOUR),
        lambda: leases.renew(old, lease.lease_id, HOUR),
        lambda: leases.release(old, lease.lease_id, "too late"),
        lambda: leases.abandon(old, lease.lease_id, "too late"),
    ):
        with pytest.raises(Fenced):
            act()
    assert leases.lease_of(ledger, "a", NODE).state == "held"


def test_two_runs_that_want_the_same_devices_at_once_do_not_deadlock_and_one_gets_all(database_url, claim_of):
    devices = [f"cpu:{number}" for number in range(8)]
    for run_id in ("a", "b"):
        claim_of(run_id)
    with (
        python(TAKE_AND_SAY, database_url, str(SQL), "a", *devices) as one,
        python(TAKE_AND_SAY, database_url, str(SQL), "b", *reversed(devices)) as other,
    ):
        for process in (one, other):
            assert process.stdout.readline() == "ready\n"
        for process in (one, other):
            process.stdin.write("go\n")
            process.stdin.flush()
        said = sorted(text.strip() for text in outputs([one, other]))
    assert said[0] in ("a", "b")
    assert said[1].startswith("busy:")
    assert f"is leased to run {said[0]} until" in said[1].replace(" are ", " is ")


def test_two_stages_of_one_run_that_take_at_once_get_one_lease(database_url, ledger, claim_of):
    first = claim_of("a")
    second = take(ledger, "a", "start", frozenset())[0]
    got = []

    def take_it(claim):
        own = claim.in_thread()
        got.append(leases.take(own, NODE, ["cpu:0", "cpu:1"], HOUR).lease_id)
        own.ledger.close()

    threads = [threading.Thread(target=take_it, args=[claim]) for claim in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2
    assert len(set(got)) == 1


def test_the_schema_itself_gives_a_device_to_one_live_lease_only(database_url, claim_of):
    lease = leases.take(claim_of("a"), NODE, ["cpu:0"], HOUR)
    with psycopg.connect(database_url, options="-c search_path=ledger") as admin:
        admin.execute("select set_config('ledger.acting', 'test', true)")
        with pytest.raises(psycopg.errors.UniqueViolation, match="one_live_lease_per_device"):
            admin.execute(
                "insert into lease_device (lease_id, node, device) select %s, 'dgx-1', 'cpu:0' "
                "from lease returning device",
                [other_lease(admin, lease)],
            )


def other_lease(admin, lease):
    admin.execute("insert into run (run_id, tenant, node, spec, pins) values ('x', 't', 'n', '{}', '{}')")
    return admin.execute(
        "insert into lease (run_id, node, expires_at) values ('x', %s, now()) returning lease_id",
        [lease.node],
    ).fetchone()[0]


class Leases(RuleBasedStateMachine):
    """Three runs over four devices: whatever they do in whatever order, no device has two holders."""

    names = st.sampled_from(["a", "b", "c"])
    devices = st.frozensets(st.sampled_from(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]), min_size=1)
    number = 0

    def __init__(self, ledger):
        super().__init__()
        self.ledger = ledger

    @initialize()
    def start(self):
        type(self).number += 1
        self.node = f"node-{self.number}"
        self.held = {}
        self.over = set()
        self.claims = {}
        for name in "abc":
            a_run(self.ledger, f"{name}-{self.number}")
            self.claims[name] = take(self.ledger, f"{name}-{self.number}", "provision", frozenset())[0]

    @rule(name=names, devices=devices)
    def take(self, name, devices):
        def act():
            return leases.take(self.claims[name], self.node, sorted(devices), HOUR)

        own = self.held.get(name)
        others = [lease.devices for other, lease in self.held.items() if other != name]
        if own is not None and set(own.devices) != devices:
            with pytest.raises(StageFailed):
                act()
        elif own is None and any(devices & set(taken) for taken in others):
            with pytest.raises(Busy):
                act()
        else:
            self.held[name] = act()
            self.over.discard(name)
            assert own is None or own.lease_id == self.held[name].lease_id

    @rule(name=names)
    def abandon(self, name):
        if name in self.held:
            leases.abandon(self.claims[name], self.held[name].lease_id, "failed")
            self.over.add(name)

    @rule(name=names)
    def release(self, name):
        if name in self.held:
            leases.release(self.claims[name], self.held.pop(name).lease_id, "restored")
            self.over.discard(name)

    @invariant()
    def ledger_and_model_agree(self):
        if not hasattr(self, "held"):
            return
        live = leases.live_leases(self.ledger, self.node)
        assert {lease.lease_id: (lease.devices, lease.is_over) for lease in live} == {
            lease.lease_id: (lease.devices, name in self.over) for name, lease in self.held.items()
        }
        devices = [device for lease in live for device in lease.devices]
        assert len(devices) == len(set(devices))


def test_leases_do_what_the_model_does(database_url):
    with open_ledger(database_url) as ledger:
        run_state_machine_as_test(
            lambda: Leases(ledger), settings=settings(max_examples=20, stateful_step_count=25, deadline=None)
        )
