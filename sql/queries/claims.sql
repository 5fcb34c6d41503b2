-- name: lock_run^
-- The run's row is the lock under which epochs are given out.
select
    run_id,
    last_epoch
from run
where run_id = :run_id
for update;

-- name: next_epoch$
update run
set
    last_epoch = last_epoch + 1,
    closed_at = case when :reopens then null else closed_at end,
    verdict = case when :reopens then null else verdict end
where run_id = :run_id
returning last_epoch;

-- name: fence
-- Whoever acted for these stages of the run may not write any more; says who that was.
update claim
set
    ended_at = clock_timestamp(),
    outcome = 'fenced',
    message = :message
where
    run_id = :run_id
    and stage = any(:stages)
    and ended_at is null
returning epoch, stage, host, boot_id, pid, start_ticks;

-- name: insert_claim!
insert into claim (run_id, epoch, stage, host, boot_id, pid, start_ticks)
values (:run_id, :epoch, :stage, :host, :boot_id, :pid, :start_ticks);

-- name: act_as^
-- Raises QP001 unless the claim is live; allows the writes of this transaction.
select ledger.act_as(:run_id, :epoch);

-- name: is_live$
select exists(
    select 1
    from claim
    where run_id = :run_id and epoch = :epoch and ended_at is null
);

-- name: hand_over!
-- The claim stays; another process acts under it from now on.
update claim
set
    host = :host,
    boot_id = :boot_id,
    pid = :pid,
    start_ticks = :start_ticks
where run_id = :run_id and epoch = :epoch;

-- name: finish!
update claim
set
    ended_at = clock_timestamp(),
    outcome = :outcome,
    message = :message,
    facts = :facts
where run_id = :run_id and epoch = :epoch and ended_at is null;

-- name: put_progress!
insert into progress (run_id, stage, epoch, done, total, unit, detail)
values (:run_id, :stage, :epoch, :done, :total, :unit, :detail)
on conflict (run_id, stage) do update
    set
        epoch = excluded.epoch,
        done = excluded.done,
        total = excluded.total,
        unit = excluded.unit,
        detail = excluded.detail,
        updated_at = clock_timestamp();

-- name: facts_of$
-- What the newest successful claim of a stage found; null when it never succeeded.
select facts
from claim
where run_id = :run_id and stage = :stage and outcome in ('done', 'nothing to do')
order by epoch desc
limit 1;

-- name: live_claims
-- Who may act now, in runs that are open.
select
    claim.run_id,
    claim.epoch,
    claim.stage,
    claim.host,
    claim.boot_id,
    claim.pid,
    claim.start_ticks
from claim
inner join run on claim.run_id = run.run_id
where claim.ended_at is null and run.closed_at is null
order by claim.run_id, claim.epoch;
