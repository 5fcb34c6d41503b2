-- name: insert_run!
-- The first to start a run freezes it; a second start finds it as it is.
insert into run (run_id, tenant, node, spec, pins)
values (:run_id, :tenant, :node, :spec, :pins)
on conflict (run_id) do nothing;

-- name: run_by_id^
select
    run_id,
    tenant,
    node,
    spec,
    pins,
    started_at,
    due_from,
    closed_at,
    verdict
from run
where run_id = :run_id;

-- name: reckon_deadline_anew!
-- Only of a run that has ended: one that is open keeps its deadline.
update run
set
    due_from = clock_timestamp(),
    spec = jsonb_set(spec, '{limits,deadline}', to_jsonb(:deadline::text))
where
    run_id = :run_id
    and closed_at is not null;

-- name: close_run!
update run
set
    closed_at = clock_timestamp(),
    verdict = :verdict
where run_id = :run_id;

-- name: close_given_up_run!
-- A claim that is newer than the failure has started the run again, unless it is the reaper's, or that of
-- a keeper, which a task that lives on may make.
update run
set
    closed_at = clock_timestamp(),
    verdict = 'failed'
where
    run_id = :run_id
    and closed_at is null
    and not exists (
        select 1
        from claim
        where
            claim.run_id = run.run_id
            and claim.stage not in ('reap', 'keeper')
            and claim.claimed_at > :failed_at
    );

-- name: newest_runs
select
    run_id,
    tenant,
    node,
    started_at,
    closed_at,
    verdict
from run
order by started_at desc
limit :limit;

-- name: stages_of_run
-- The newest claim of each stage, with how far it is.
select distinct on (claim.stage)
    claim.stage,
    claim.epoch,
    claim.claimed_at,
    claim.ended_at,
    claim.outcome,
    claim.message,
    claim.facts,
    progress.done,
    progress.total,
    progress.unit,
    progress.detail
from claim
left join progress
    on
        claim.run_id = progress.run_id
        and claim.stage = progress.stage
        and claim.epoch = progress.epoch
where claim.run_id = :run_id
order by claim.stage asc, claim.epoch desc;
