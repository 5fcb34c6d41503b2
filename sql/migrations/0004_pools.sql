-- Pools: the workers that serve one release for one run, and the keeper that parents them.
--
-- A pool is written down before its keeper exists, and a worker's attempt before its process, so that a kill
-- between the two leaves nothing unknown. Processes are named by pid, start time, boot and host.

create table ledger.pool (
    pool_id text primary key,
    run_id text not null references ledger.run,
    node text not null,
    lease_id bigint,
    release_id text not null,
    release_path text not null,
    slots jsonb not null,
    registry text,
    host text,
    boot_id text,
    pid integer,
    start_ticks bigint,
    intended_at timestamptz not null default clock_timestamp(),
    started_at timestamptz,
    ended_at timestamptz,
    reason text,
    constraint an_ended_pool_has_a_reason check ((ended_at is null) = (reason is null)),
    constraint a_started_pool_has_a_keeper check ((started_at is null) = (pid is null))
);

comment on table ledger.pool is 'One keeper''s pool. Another keeper means another pool, with its own key.';
comment on column ledger.pool.slots is 'What the workers get, in order, as provision handed it on.';
comment on column ledger.pool.registry is 'Where the keeper answers who is ready.';

create unique index one_open_pool_per_run on ledger.pool (run_id) where ended_at is null;

create table ledger.pool_worker (
    pool_id text not null references ledger.pool,
    worker_id text not null,
    attempt integer not null check (attempt > 0),
    command jsonb not null,
    log text not null,
    ports int4range not null,
    state text not null check (
        state in ('starting', 'warming', 'ready', 'suspect', 'dead', 'stopping', 'stopped')
    ),
    evidence text not null,
    host text,
    boot_id text,
    pid integer,
    start_ticks bigint,
    intended_at timestamptz not null default clock_timestamp(),
    changed_at timestamptz not null default clock_timestamp(),
    primary key (pool_id, worker_id, attempt)
);

comment on table ledger.pool_worker is 'One start of one worker in its slot; the next attempt replaces it.';
comment on column ledger.pool_worker.command is 'Its command line; the key is in the environment.';
comment on column ledger.pool_worker.ports is 'The block that it may use.';

create table ledger.pool_worker_change (
    change_id bigint generated always as identity primary key,
    pool_id text not null,
    worker_id text not null,
    attempt integer not null,
    state text not null,
    evidence text not null,
    at timestamptz not null default clock_timestamp(),
    foreign key (pool_id, worker_id, attempt) references ledger.pool_worker
);

comment on table ledger.pool_worker_change is 'Every change of a worker''s state, with its evidence.';

create trigger require_claim before insert or update or delete on ledger.pool
for each statement execute function ledger.require_claim();

create trigger require_claim before insert or update or delete on ledger.pool_worker
for each statement execute function ledger.require_claim();

create trigger require_claim before insert or update or delete on ledger.pool_worker_change
for each statement execute function ledger.require_claim();
