-- What is known of a worker beyond its state: how its first requests went, and what it holds outside of its
-- own memory, which nobody else could give back if it was killed.

alter table ledger.pool_worker add column startup jsonb;
alter table ledger.pool_worker add column shared_memory text[] not null default '{}';
alter table ledger.pool add column memory_before jsonb not null default '{}';

comment on column ledger.pool.memory_before is 'Bytes in use on each device before the pool.';
comment on column ledger.pool_worker.startup is 'How its start went: timeline, first requests, cache.';
comment on column ledger.pool_worker.shared_memory is 'Files in /dev/shm that its processes had open.';
