-- name: lock_tenant$
-- One lease of a tenant is counted and taken at a time, on whatever node.
select pg_advisory_xact_lock(hashtextextended('tenant ' || :tenant, 0))::text;

-- name: devices_of_tenant$
-- How many devices the runs hold now, on all nodes; expired leases too, until somebody releases them.
select count(*)
from lease
inner join lease_device on lease.lease_id = lease_device.lease_id
inner join run on lease.run_id = run.run_id
where
    lease.live
    and run.tenant = :tenant;

-- name: device_hours_of_tenant$
-- What the tenant's leases took of the last 24 hours: each device from the lease's beginning to its release.
select
    coalesce(
        sum(
            extract(
                epoch from
                coalesce(lease.released_at, clock_timestamp())
                - greatest(lease.taken_at, clock_timestamp() - interval '24 hours')
            )
        ) / 3600,
        0
    )::double precision
from lease
inner join lease_device on lease.lease_id = lease_device.lease_id
inner join run on lease.run_id = run.run_id
where
    run.tenant = :tenant
    and coalesce(lease.released_at, clock_timestamp()) > clock_timestamp() - interval '24 hours';

-- name: tokens_of_tenant$
-- What the runs spent in the last 24 hours; of a range that began earlier, the share of its time since.
select
    coalesce(
        sum(
            segment.tokens
            * coalesce(
                extract(
                    epoch from
                    segment.last_registered_at
                    - greatest(segment.first_registered_at, clock_timestamp() - interval '24 hours')
                )
                / nullif(extract(epoch from segment.last_registered_at - segment.first_registered_at), 0),
                1
            )
        ),
        0
    )::bigint
from segment
inner join run on segment.run_id = run.run_id
where
    run.tenant = :tenant
    and segment.last_registered_at > clock_timestamp() - interval '24 hours';
