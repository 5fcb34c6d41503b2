-- What the rows of a segment cost: a tenant's tokens of a day are summed from here while runs are at work.

alter table ledger.segment add column tokens bigint not null default 0 check (tokens >= 0);

comment on column ledger.segment.tokens is 'Prompt and completion tokens of its rows.';
