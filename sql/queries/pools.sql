-- name: intend_pool!
insert into pool (pool_id, run_id, node, lease_id, release_id, release_path, slots, memory_before)
values (:pool_id, :run_id, :node, :lease_id, :release_id, :release_path, :slots, :memory_before);

-- name: pool_started!
-- Written by the keeper itself, once its registry answers.
update pool
set
    registry = :registry,
    host = :host,
    boot_id = :boot_id,
    pid = :pid,
    start_ticks = :start_ticks,
    started_at = clock_timestamp()
where pool_id = :pool_id;

-- name: end_pool!
update pool
set
    ended_at = clock_timestamp(),
    reason = :reason
where pool_id = :pool_id and ended_at is null;

-- name: end_workers_of_pool!
-- Those whose end their keeper has not written down: it was fenced, or died with them.
with changed as (
    update pool_worker
    set
        state = 'stopped',
        evidence = :evidence,
        changed_at = clock_timestamp()
    where pool_id = :pool_id and state not in ('dead', 'stopped')
    returning pool_id, worker_id, attempt, state, evidence
)

insert into pool_worker_change (pool_id, worker_id, attempt, state, evidence)
select
    pool_id,
    worker_id,
    attempt,
    state,
    evidence
from changed;

-- name: pool_by_id^
select
    pool_id,
    run_id,
    node,
    lease_id,
    release_id,
    release_path,
    slots,
    memory_before,
    registry,
    host,
    boot_id,
    pid,
    start_ticks,
    ended_at,
    reason
from pool
where pool_id = :pool_id;

-- name: open_pool_of_run^
-- At most one row: the partial unique index one_open_pool_per_run says so.
select
    pool_id,
    run_id,
    node,
    lease_id,
    release_id,
    release_path,
    slots,
    memory_before,
    registry,
    host,
    boot_id,
    pid,
    start_ticks,
    ended_at,
    reason
from pool
where run_id = :run_id and ended_at is null;

-- name: why_newest_pool_ended$
select reason
from pool
where run_id = :run_id
order by intended_at desc
limit 1;

-- name: run_had_pool$
-- At some time since then, however it ended.
select exists(
    select 1
    from pool
    where run_id = :run_id and coalesce(ended_at, clock_timestamp()) >= :since
);

-- name: open_pools_of_node
select
    pool_id,
    run_id,
    node,
    lease_id,
    release_id,
    release_path,
    slots,
    memory_before,
    registry,
    host,
    boot_id,
    pid,
    start_ticks,
    ended_at,
    reason
from pool
where node = :node and ended_at is null
order by intended_at;

-- name: intend_worker!
insert into pool_worker (pool_id, worker_id, attempt, command, log, ports, state, evidence)
values (
    :pool_id,
    :worker_id,
    :attempt,
    :command,
    :log,
    int4range(:first_port, :end_port),
    'starting',
    'about to be started'
);

-- name: worker_started!
update pool_worker
set
    host = :host,
    boot_id = :boot_id,
    pid = :pid,
    start_ticks = :start_ticks
where pool_id = :pool_id and worker_id = :worker_id and attempt = :attempt;

-- name: worker_warmed!
update pool_worker
set
    startup = :startup,
    shared_memory = :shared_memory
where pool_id = :pool_id and worker_id = :worker_id and attempt = :attempt;

-- name: worker_changed!
with changed as (
    update pool_worker
    set
        state = :state,
        evidence = :evidence,
        changed_at = clock_timestamp()
    where pool_id = :pool_id and worker_id = :worker_id and attempt = :attempt
    returning pool_id, worker_id, attempt, state, evidence
)

insert into pool_worker_change (pool_id, worker_id, attempt, state, evidence)
select
    pool_id,
    worker_id,
    attempt,
    state,
    evidence
from changed;

-- name: workers_of_run
-- Every attempt of every pool that the run ever had.
select
    pool_worker.pool_id,
    pool_worker.worker_id,
    pool_worker.attempt,
    lower(pool_worker.ports) as first_port,
    pool_worker.state,
    pool_worker.host,
    pool_worker.boot_id,
    pool_worker.pid,
    pool_worker.start_ticks,
    pool_worker.shared_memory,
    pool.ended_at is not null as pool_ended
from pool_worker
inner join pool on pool_worker.pool_id = pool.pool_id
where pool.run_id = :run_id
order by pool.intended_at asc, pool_worker.worker_id asc, pool_worker.attempt asc;

-- name: pool_processes_of_run
-- Keepers and servers of the run's pools of which nobody has written down that nothing is left.
select
    pool.host,
    pool.boot_id,
    pool.pid,
    pool.start_ticks
from pool
where pool.run_id = :run_id and pool.ended_at is null and pool.pid is not null
union all
select
    pool_worker.host,
    pool_worker.boot_id,
    pool_worker.pid,
    pool_worker.start_ticks
from pool_worker
inner join pool on pool_worker.pool_id = pool.pool_id
where pool.run_id = :run_id and pool.ended_at is null and pool_worker.pid is not null;

-- name: run_is_open$
select exists(
    select 1
    from run
    where run_id = :run_id and closed_at is null
);

-- name: ports_of_other_runs
-- First ports of what runs there now, as far as the ledger knows.
select lower(pool_worker.ports) as first_port
from pool_worker
inner join pool on pool_worker.pool_id = pool.pool_id
where
    pool.node = :node
    and pool.run_id <> :run_id
    and pool.ended_at is null
    and pool_worker.state not in ('dead', 'stopped');

-- name: newest_workers_of_run
-- The newest start of each worker in the run's newest pool.
select
    pool_worker.pool_id,
    pool_worker.worker_id,
    pool_worker.attempt,
    pool_worker.state,
    pool_worker.evidence,
    pool_worker.log,
    pool_worker.startup,
    pool_worker.changed_at,
    pool.node,
    pool.registry,
    pool.ended_at as pool_ended_at,
    pool.reason as pool_reason
from pool_worker
inner join pool on pool_worker.pool_id = pool.pool_id
where
    pool.pool_id = (
        select newest.pool_id
        from pool as newest
        where newest.run_id = :run_id
        order by newest.intended_at desc
        limit 1
    )
    and pool_worker.attempt = (
        select max(later.attempt)
        from pool_worker as later
        where later.pool_id = pool_worker.pool_id and later.worker_id = pool_worker.worker_id
    )
order by pool_worker.worker_id;
