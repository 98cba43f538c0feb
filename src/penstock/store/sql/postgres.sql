-- Statements that differ from the other database's.

-- name: store_exists
select count(*) as found from information_schema.tables where table_schema = :schema and table_name = 'store';

-- name: schema_exists
select count(*) as found from pg_namespace where nspname = :schema;

-- A block is 4096 payload ids, so that one call serves one append.
-- name: allocate_block
select nextval('penstock.payload_block') as block;

-- name: lock_registration
select r.*, c.name as consumer, q.name as queue
from penstock.registration as r
join penstock.consumer as c on c.consumer_id = r.consumer_id
join penstock.queue as q on q.queue_id = r.queue_id
where c.name = :consumer and q.name = :queue
for update of r;

-- name: lock_partition
select * from penstock.partition where queue_id = :queue_id and partition = :partition for update;

-- name: lock_queue
select * from penstock.queue where name = :name for update;

-- name: clock
select (extract(epoch from clock_timestamp()) * 1000000)::bigint as now;
