-- Runs, and who may act for them.
--
-- An epoch is a claim's number within its run. A claim that is not ended is live; whoever holds one that has
-- ended may not write. The triggers below make that a property of the schema, not of the callers' care.

create schema ledger;

create table ledger.run (
    run_id text primary key check (run_id <> ''),
    tenant text not null,
    node text not null,
    spec jsonb not null,
    pins jsonb not null,
    last_epoch bigint not null default 0,
    started_at timestamptz not null default now(),
    closed_at timestamptz,
    verdict text check (verdict in ('done', 'partial', 'failed')),
    constraint a_closed_run_has_a_verdict check ((closed_at is null) = (verdict is null))
);

comment on column ledger.run.spec is 'The spec with every date resolved; frozen when the run first started.';
comment on column ledger.run.pins is 'What else was open and is now fixed: commit of the model, versions.';

create table ledger.claim (
    run_id text not null references ledger.run,
    epoch bigint not null,
    stage text not null,
    host text not null,
    boot_id text not null,
    pid integer not null,
    start_ticks bigint not null,
    claimed_at timestamptz not null default clock_timestamp(),
    ended_at timestamptz,
    outcome text check (outcome in ('done', 'nothing to do', 'failed', 'fenced')),
    message text,
    facts jsonb,
    primary key (run_id, epoch),
    constraint an_ended_claim_has_an_outcome check ((ended_at is null) = (outcome is null))
);

create unique index one_live_claim_per_stage on ledger.claim (run_id, stage) where ended_at is null;

create table ledger.progress (
    run_id text not null,
    stage text not null,
    epoch bigint not null,
    done bigint not null,
    total bigint not null,
    unit text not null,
    detail jsonb not null default '{}',
    updated_at timestamptz not null default clock_timestamp(),
    primary key (run_id, stage),
    foreign key (run_id, epoch) references ledger.claim,
    constraint done_is_within_total check (done between 0 and total)
);

comment on table ledger.progress is 'How far a stage is; a display, never a basis for what is still to do.';

-- The share lock makes a successor wait for writes that have begun, and makes those that begin later see it.
create function ledger.act_as(acting_run text, acting_epoch bigint) returns void
language plpgsql as $$
begin
    perform 1 from ledger.claim
    where run_id = acting_run and epoch = acting_epoch and ended_at is null
    for share;
    if not found then
        raise exception 'claim % of run % has ended', acting_epoch, acting_run using errcode = 'QP001';
    end if;
    perform set_config('ledger.acting', acting_run || '/' || acting_epoch, true);
end
$$;

create function ledger.require_claim() returns trigger
language plpgsql as $$
begin
    if coalesce(current_setting('ledger.acting', true), '') = '' then
        raise exception 'a write to % outside of a claim', tg_table_name using errcode = 'QP002';
    end if;
    return null;
end
$$;

create trigger require_claim before insert or update or delete on ledger.progress
for each statement execute function ledger.require_claim();
