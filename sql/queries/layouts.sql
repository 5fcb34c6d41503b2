-- name: record_layout!
-- The first record stays, except after a reboot, which took what it speaks of.
insert into lease_layout (lease_id, gpu_uuid, boot_id, before, target, replaced)
values (:lease_id, :gpu_uuid, :boot_id, :before, :target, :replaced)
on conflict (lease_id, gpu_uuid) do update
    set
        boot_id = excluded.boot_id,
        before = excluded.before,
        target = excluded.target,
        replaced = excluded.replaced,
        recorded_at = clock_timestamp(),
        restored_at = null,
        missing = '[]'
    where lease_layout.boot_id <> excluded.boot_id or lease_layout.restored_at is not null;

-- name: layouts_of_lease
select
    gpu_uuid,
    boot_id,
    before,
    target,
    replaced,
    restored_at is not null as restored,
    missing
from lease_layout
where lease_id = :lease_id
order by gpu_uuid;

-- name: layout_is_restored!
update lease_layout
set
    restored_at = clock_timestamp(),
    missing = '[]'
where lease_id = :lease_id and gpu_uuid = :gpu_uuid and restored_at is null;

-- name: layout_misses!
update lease_layout
set missing = :missing
where lease_id = :lease_id and gpu_uuid = :gpu_uuid and restored_at is null;
