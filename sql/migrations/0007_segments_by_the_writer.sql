-- Only the batch's writer registers segments.
--
-- Two runs of one batch may each hold a live claim; were both to register, the order of commits, which
-- decides what of two answers counts, would depend on who is faster. The share lock makes a change of the
-- writer wait for registrations that have begun, and makes those that begin later see it.

create function ledger.require_writer() returns trigger
language plpgsql as $$
begin
    if current_setting('ledger.acting', true) is distinct from new.run_id || '/' || new.epoch then
        raise exception 'a segment of claim % of run % registered by another', new.epoch, new.run_id
            using errcode = 'QP003';
    end if;
    perform 1 from ledger.batch
    where batch_id = new.batch_id and writer_run_id = new.run_id and writer_epoch = new.epoch
    for share;
    if not found then
        raise exception 'claim % of run % is not the writer of batch %', new.epoch, new.run_id, new.batch_id
            using errcode = 'QP003';
    end if;
    return new;
end
$$;

create trigger require_writer before insert or update on ledger.segment
for each row execute function ledger.require_writer();
