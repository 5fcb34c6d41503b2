-- name: live_leases
-- Expired and abandoned ones too: until they are released nobody else gets their devices.
select
    lease.lease_id,
    lease.run_id,
    lease.node,
    lease.state,
    lease.reason,
    lease.taken_at,
    lease.expires_at,
    extract(epoch from lease.expires_at - clock_timestamp())::double precision as left_s,
    array(
        select lease_device.device
        from lease_device
        where lease_device.lease_id = lease.lease_id
        order by lease_device.device
    ) as devices
from lease
where
    lease.live
    and (:node::text is null or lease.node = :node)
    and (:run_id::text is null or lease.run_id = :run_id)
order by lease.lease_id;

-- name: insert_lease$
insert into lease (run_id, node, expires_at)
values (:run_id, :node, clock_timestamp() + make_interval(secs => :lease_s))
returning lease_id;

-- name: insert_lease_devices!
-- In one order for everybody, so that two runs that want the same devices cannot deadlock.
insert into lease_device (lease_id, node, device)
select
    :lease_id,
    :node,
    wanted.device
from unnest(:devices::text[]) as wanted (device)
order by wanted.device
on conflict (node, device) where live do nothing;

-- name: holders_of_devices
select
    lease.run_id,
    lease.expires_at,
    lease.state,
    lease.expires_at <= clock_timestamp() as expired,
    array_agg(lease_device.device order by lease_device.device) as devices
from lease_device
inner join lease on lease_device.lease_id = lease.lease_id
where
    lease_device.live
    and lease_device.node = :node
    and lease_device.device = any(:devices::text[])
    and lease_device.lease_id <> :lease_id
group by lease.lease_id
order by lease.expires_at desc;

-- name: hold_again!
-- The run itself comes back for its lease, which it may have let expire or abandoned.
update lease
set
    state = 'held',
    reason = null,
    expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :lease_s))
where lease_id = :lease_id and run_id = :run_id and live;

-- name: renew_lease$
-- Null when the lease is no longer held.
update lease
set expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => :lease_s))
where lease_id = :lease_id and run_id = :run_id and state = 'held'
returning expires_at;

-- name: abandon_lease!
update lease
set
    state = 'abandoned',
    reason = :reason
where lease_id = :lease_id and run_id = :run_id and live;

-- name: release_lease!
update lease
set
    state = 'released',
    reason = :reason,
    released_at = clock_timestamp()
where lease_id = :lease_id and run_id = :run_id and live;

-- name: why_lease_ended^
select
    state,
    reason
from lease
where lease_id = :lease_id;

-- name: lock_line$
-- Places are numbered in the order in which they are seen.
select pg_advisory_xact_lock(hashtextextended('lease_place ' || :node, 0))::text;

-- name: keep_place$
insert into lease_place (run_id, node, devices, expires_at)
values (:run_id, :node, :devices, clock_timestamp() + make_interval(secs => :place_s))
on conflict (run_id, node) do update
    set
    -- Who comes back too late starts again at the end.
        place_id = case
            when lease_place.expires_at < clock_timestamp() then excluded.place_id
            else lease_place.place_id
        end,
        devices = excluded.devices,
        expires_at = excluded.expires_at
returning place_id;

-- name: leave_line!
delete from lease_place
where run_id = :run_id and node = :node;

-- name: ahead_in_line
select
    earlier.run_id,
    earlier.asked_at
from lease_place as earlier
inner join run on earlier.run_id = run.run_id
where
    earlier.node = :node
    -- A run that was given up does not come back to leave the line.
    and run.closed_at is null
    and earlier.run_id <> :run_id
    and earlier.devices && :devices::text[]
    and earlier.expires_at > clock_timestamp()
    and earlier.place_id < coalesce(
        (
            select own.place_id
            from lease_place as own
            where own.run_id = :run_id and own.node = :node
        ),
        9223372036854775807
    )
order by earlier.place_id;
