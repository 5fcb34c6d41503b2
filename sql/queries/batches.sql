-- name: insert_batch!
insert into batch (batch_id, identity, rows)
values (:batch_id, :identity, :rows)
on conflict (batch_id) do update
    set cleared_at = null
    where batch.cleared_at is not null;

-- name: is_batch_known$
-- One whose files were removed is to be recorded again.
select exists(
    select 1
    from batch
    where
        batch_id = :batch_id
        and cleared_at is null
);

-- name: lock_batch^
-- The batch's row is the lock under which its writer changes.
select batch_id
from batch
where batch_id = :batch_id
for update;

-- name: writer_of_batch^
-- Whose live claim writes to the batch; no row when nobody's does. The claim of a closed run is over.
select
    claim.run_id,
    claim.epoch,
    claim.stage,
    claim.host,
    claim.boot_id,
    claim.pid,
    claim.start_ticks
from batch
inner join claim on batch.writer_run_id = claim.run_id and batch.writer_epoch = claim.epoch
inner join run on claim.run_id = run.run_id
where
    batch.batch_id = :batch_id
    and claim.ended_at is null
    and run.closed_at is null;

-- name: set_writer_of_batch!
update batch
set
    writer_run_id = :run_id,
    writer_epoch = :epoch
where batch_id = :batch_id;

-- name: register_segment!
-- Registers once more what has grown; a range never shrinks.
insert into segment (batch_id, path, run_id, epoch, start_byte, stop_byte, rows, tokens)
values (:batch_id, :path, :run_id, :epoch, :start_byte, :stop_byte, :rows, :tokens)
on conflict (batch_id, path, run_id, epoch) do update
    set
        stop_byte = excluded.stop_byte,
        rows = excluded.rows,
        tokens = excluded.tokens,
        last_registered_at = clock_timestamp()
    where segment.stop_byte < excluded.stop_byte;

-- name: segments_of_batch
-- In the order of commits.
select
    path,
    start_byte,
    stop_byte,
    rows,
    run_id
from segment
where batch_id = :batch_id
order by position;

-- name: pace_of_claim^
-- Rows that were registered under one claim, and the seconds from its beginning to the last of them.
select
    coalesce(sum(segment.rows), 0)::bigint as rows,
    extract(epoch from max(segment.last_registered_at) - min(claim.claimed_at))::double precision as seconds
from segment
inner join claim on segment.run_id = claim.run_id and segment.epoch = claim.epoch
where
    segment.batch_id = :batch_id
    and segment.run_id = :run_id
    and segment.epoch = :epoch;

-- name: insert_publication!
insert into publication (
    batch_id, output, version, run_id, epoch, answered, failed, not_started
)
values (
    :batch_id, :output, :version, :run_id, :epoch, :answered, :failed, :not_started
)
on conflict (batch_id, output, version) do nothing;

-- name: is_published$
select exists(
    select 1
    from publication
    where batch_id = :batch_id and output = :output and version = :version
);

-- name: lock_output$
-- One publishes to an output at a time.
select pg_advisory_xact_lock(hashtextextended('output ' || :output, 0))::text;

-- name: lock_idle_batch^
-- No row when somebody else has the lock.
select batch_id
from batch
where batch_id = :batch_id
for update skip locked;

-- name: batches_past_retention
-- What runs of them worked with may go: published whole long ago, by a claim that saw all that was
-- registered, and no run that was open since then counts on it. Of all batches, or of the one that is named.
select batch.batch_id
from batch
inner join publication on batch.batch_id = publication.batch_id
inner join claim on publication.run_id = claim.run_id and publication.epoch = claim.epoch
where
    batch.cleared_at is null
    and (:batch_id::text is null or batch.batch_id = :batch_id)
    and publication.not_started = 0
    and not exists (
        select 1
        from claim as prepared
        inner join run on prepared.run_id = run.run_id
        where
            prepared.stage = 'prepare'
            and prepared.facts ->> 'batch_id' = batch.batch_id
            and coalesce(run.closed_at, 'infinity') > clock_timestamp() - make_interval(secs => :retention_s)
    )
    -- One that prepares now may be about to; one that began a day ago was killed.
    and not exists (
        select 1
        from claim as preparing
        inner join run on preparing.run_id = run.run_id
        where
            preparing.stage = 'prepare'
            and preparing.ended_at is null
            and preparing.claimed_at > clock_timestamp() - interval '1 day'
            and run.closed_at is null
    )
group by batch.batch_id
having
    max(publication.published_at) < clock_timestamp() - make_interval(secs => :retention_s)
    and max(claim.claimed_at) >= coalesce(
        (
            select max(segment.last_registered_at)
            from segment
            where segment.batch_id = batch.batch_id
        ),
        '-infinity'
    )
order by max(publication.published_at)
limit :most;

-- name: folders_of_batch
-- Where runs have prepared it: one in each output.
select distinct facts ->> 'folder' as folder
from claim
where
    stage = 'prepare'
    and facts ->> 'batch_id' = :batch_id;

-- name: delete_segments_of_batch!
delete from segment
where batch_id = :batch_id;

-- name: set_batch_cleared!
update batch
set cleared_at = clock_timestamp()
where batch_id = :batch_id;
