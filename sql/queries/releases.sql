-- name: put_release!
-- A release that was made again takes the place of its old record.
insert into release (
    node, release_id, path, manifest_sha256, fingerprint, metrics, bytes, files, made_by_run
)
values (
    :node, :release_id, :path, :manifest_sha256, :fingerprint, :metrics, :bytes, :files, :run_id
)
on conflict (node, release_id) do update
    set
        path = excluded.path,
        manifest_sha256 = excluded.manifest_sha256,
        fingerprint = excluded.fingerprint,
        metrics = excluded.metrics,
        bytes = excluded.bytes,
        files = excluded.files,
        made_by_run = excluded.made_by_run,
        published_at = clock_timestamp(),
        removed_at = null;

-- name: recorded_manifest$
-- The hash of the manifest under which a release is recorded; null when it is not, or was removed.
select manifest_sha256
from release
where node = :node and release_id = :release_id and removed_at is null;

-- name: users_of_release
-- Runs that need it: an open pool serves it, or the run is open and pinned to it.
select
    run.run_id,
    pool.pool_id is not null as is_served
from run
left join pool
    on
        run.run_id = pool.run_id
        and pool.ended_at is null
        and pool.node = :node
        and pool.release_id = :release_id
where
    pool.pool_id is not null
    or (run.closed_at is null and run.node = :node and run.pins ->> 'release_id' = :release_id)
order by run.run_id;

-- name: maker_of_release$
-- The run that made it; null when the ledger does not know it.
select made_by_run
from release
where node = :node and release_id = :release_id;

-- name: remove_release!
update release
set removed_at = clock_timestamp()
where node = :node and release_id = :release_id and removed_at is null;
