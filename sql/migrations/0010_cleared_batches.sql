-- What runs of a batch worked with is removed once, some time after all of it is published.

alter table ledger.batch add column cleared_at timestamptz;

comment on column ledger.batch.cleared_at is 'When its files were removed; null while it is prepared.';

-- Which runs have prepared a batch, and where.
create index claims_that_prepared_a_batch on ledger.claim ((facts ->> 'batch_id')) where stage = 'prepare';
