-- Statements that differ from the other database's.

-- name: store_exists
select count(*) as found from penstock.sqlite_schema where type = 'table' and name = 'penstock_store';

-- A block is 4096 payload ids, so that one call serves one append.
-- name: allocate_block
update penstock.store set next_block = next_block + 1 returning next_block - 1 as block;

-- Timestamps never go back.
-- name: advance_partition
update penstock.partition
set next_index = next_index + :row_count,
    bytes = bytes + :bytes,
    segments = segments + :segments,
    last_timestamp = max(last_timestamp, :now)
where queue_id = :queue_id and partition = :partition
returning next_index, last_timestamp, segments, total;

-- name: lock_registration
select r.*, c.name as consumer, q.name as queue
from penstock.registration as r
join penstock.consumer as c on c.consumer_id = r.consumer_id
join penstock.queue as q on q.queue_id = r.queue_id
where c.name = :consumer and q.name = :queue;

-- name: lock_registrations
select r.*, c.name as consumer, q.name as queue
from penstock.registration as r
join penstock.consumer as c on c.consumer_id = r.consumer_id
join penstock.queue as q on q.queue_id = r.queue_id
where r.queue_id = :queue_id
order by c.name;

-- name: lock_partition
select * from penstock.partition where queue_id = :queue_id and partition = :partition;

-- name: lock_queue
select * from penstock.queue where name = :name;
