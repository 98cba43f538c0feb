-- Statements that differ from the other database's.

-- name: store_exists
select count(*) as found from penstock.sqlite_schema where type = 'table' and name = 'store';

-- A block is 4096 payload ids, so that one call serves one append.
-- name: allocate_block
update penstock.store set next_block = next_block + 1 returning next_block - 1 as block;

-- name: lock_registration
select r.*, c.name as consumer, q.name as queue
from penstock.registration as r
join penstock.consumer as c on c.consumer_id = r.consumer_id
join penstock.queue as q on q.queue_id = r.queue_id
where c.name = :consumer and q.name = :queue;

-- name: lock_partition
select * from penstock.partition where queue_id = :queue_id and partition = :partition;

-- name: lock_queue
select * from penstock.queue where name = :name;

-- name: clock
select cast(:now as integer) as now;
