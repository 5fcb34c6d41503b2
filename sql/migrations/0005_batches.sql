-- Batches, the segments that hold their finished rows, and what was published of them.
--
-- A batch outlives its runs and belongs to none: two runs of one batch share its answers. At most one live
-- claim writes to it at a time.

create table ledger.batch (
    batch_id text primary key,
    identity jsonb not null,
    rows bigint not null check (rows >= 0),
    recorded_at timestamptz not null default clock_timestamp(),
    writer_run_id text,
    writer_epoch bigint,
    foreign key (writer_run_id, writer_epoch) references ledger.claim,
    constraint a_writer_is_a_claim check ((writer_run_id is null) = (writer_epoch is null))
);

comment on column ledger.batch.identity is 'What the batch id is the hash of.';
comment on column ledger.batch.writer_run_id is 'Who registers segments, until its claim ends.';

-- Bytes of a segment count once they are registered here. A range belongs to the claim that registered it:
-- what a killed attempt left unregistered is a range of its successor's, so the order of commits never
-- changes later.
create table ledger.segment (
    batch_id text not null references ledger.batch,
    path text not null,
    run_id text not null,
    epoch bigint not null,
    position bigint not null generated always as identity,
    start_byte bigint not null,
    stop_byte bigint not null,
    rows bigint not null,
    first_registered_at timestamptz not null default clock_timestamp(),
    last_registered_at timestamptz not null default clock_timestamp(),
    primary key (batch_id, path, run_id, epoch),
    foreign key (run_id, epoch) references ledger.claim,
    constraint a_range_holds_something check (0 <= start_byte and start_byte < stop_byte and rows > 0)
);

comment on column ledger.segment.position is 'Order of commits: of two answers to a row the first counts.';

create table ledger.publication (
    batch_id text not null references ledger.batch,
    output text not null,
    version text not null,
    run_id text not null,
    epoch bigint not null,
    answered bigint not null,
    failed bigint not null,
    not_started bigint not null,
    published_at timestamptz not null default clock_timestamp(),
    primary key (batch_id, output, version),
    foreign key (run_id, epoch) references ledger.claim
);

create trigger require_claim before insert or update or delete on ledger.batch
for each statement execute function ledger.require_claim();

create trigger require_claim before insert or update or delete on ledger.segment
for each statement execute function ledger.require_claim();

create trigger require_claim before insert or update or delete on ledger.publication
for each statement execute function ledger.require_claim();
