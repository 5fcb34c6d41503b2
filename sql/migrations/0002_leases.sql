-- Leases: a run's durable claim on devices of a node.
--
-- A lease that has expired is still live: its devices may be in use by processes that nobody has ended yet.
-- Whoever has made sure that they are gone (restore, or the reaper) releases it; the next comer never does.

create table ledger.lease (
    lease_id bigint generated always as identity primary key,
    run_id text not null references ledger.run,
    node text not null,
    state text not null default 'held' check (state in ('held', 'abandoned', 'released')),
    live boolean not null generated always as (state <> 'released') stored,
    taken_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    released_at timestamptz,
    reason text,
    constraint a_released_lease_says_when check ((released_at is null) = (state <> 'released')),
    constraint what_is_not_held_says_why check (state = 'held' or reason is not null),
    constraint devices_follow_their_lease unique (lease_id, node, live)
);

comment on column ledger.lease.expires_at is 'In the time of the database; hosts'' clocks differ.';
comment on column ledger.lease.state is 'abandoned: its stage failed; the reaper need not wait for expiry.';

create unique index one_live_lease_of_a_run_per_node on ledger.lease (run_id, node) where live;

-- `live` follows the lease by the foreign key's cascade, so that no writer can forget it.
create table ledger.lease_device (
    lease_id bigint not null,
    node text not null,
    device text not null,
    live boolean not null default true,
    primary key (lease_id, device),
    constraint devices_follow_their_lease foreign key (lease_id, node, live)
    references ledger.lease (lease_id, node, live) on update cascade
);

comment on column ledger.lease_device.device is 'cpu:CORE, or the UUID of a GPU.';

create unique index one_live_lease_per_device on ledger.lease_device (node, device) where live;

create trigger require_claim before insert or update or delete on ledger.lease
for each statement execute function ledger.require_claim();

create trigger require_claim before insert or update or delete on ledger.lease_device
for each statement execute function ledger.require_claim();
