-- A run that is started again after its end gets a new deadline where the old one is over: else it could
-- never succeed.

alter table ledger.run add column due_from timestamptz;

update ledger.run set due_from = started_at;

alter table ledger.run
alter column due_from set not null,
alter column due_from set default now();

comment on column ledger.run.due_from is 'Whence its deadline counts: its start, or a later one.';
comment on column ledger.run.spec is 'Dates resolved, frozen at its start, but for a deadline that was over.';
