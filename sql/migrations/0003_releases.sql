-- Releases: which converted checkpoints are in which node's store, and what they were made from.
--
-- A record, never the proof: whether a release is there and right is read from the store each time.

create table ledger.release (
    node text not null,
    release_id text not null,
    path text not null,
    manifest_sha256 text not null,
    fingerprint jsonb not null,
    metrics jsonb not null default '{}',
    bytes bigint not null check (bytes > 0),
    files integer not null check (files > 0),
    made_by_run text not null references ledger.run,
    published_at timestamptz not null default clock_timestamp(),
    removed_at timestamptz,
    primary key (node, release_id)
);

comment on column ledger.release.manifest_sha256 is 'Of its manifest, which holds the sha256 of every file.';
comment on column ledger.release.fingerprint is 'Everything its bytes depend on; its hash is part of the id.';

create trigger require_claim before insert or update or delete on ledger.release
for each statement execute function ledger.require_claim();
