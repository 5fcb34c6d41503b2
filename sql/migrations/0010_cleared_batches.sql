-- What runs of a batch worked with is removed once, some time after all of it is published.

alter table ledger.batch add column cleared_at timestamptz;

comment on column ledger.batch.cleared_at is 'When its files were removed; null while it is prepared.';
