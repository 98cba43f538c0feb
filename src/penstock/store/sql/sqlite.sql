-- Statements that differ between the databases.

-- name: store_exists
select count(*) as found from penstock.sqlite_schema where type = 'table' and name = 'penstock_store';

-- A block is 4096 payload ids, so that one call serves one append.
-- name: allocate_block
update penstock.store set next_block = next_block + 1 returning next_block - 1 as block;

-- Timestamps grow from one append to the next, by :gap if the clock has not advanced. The channel is the queue's wakeup file.
-- name: advance_partition
update penstock.partition
set next_index = next_index + :row_count,
    bytes = bytes + :bytes,
    segments = segments + :segments,
    last_timestamp = case when :now > last_timestamp then :now else last_timestamp + :gap end,
    last_clock = case when :now > last_timestamp then :now else last_clock end
where queue_id = :queue_id and partition = :partition
returning partition, next_index, last_timestamp, segments, total, cast(queue_id as text) as channel;

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

-- name: lock_partitions
select partition, first_index, next_index, last_timestamp, last_clock, bytes, segments
from penstock.partition where queue_id = :queue_id order by partition;

-- name: lock_partition
select partition, first_index, next_index, last_timestamp, last_clock, bytes, segments
from penstock.partition where queue_id = :queue_id and partition = :partition;

-- name: lock_queue
select * from penstock.queue where name = :name;

-- name: lock_pump
select name, owner, epoch, alive_at, version, timestamp, part_version, part_rows, state
from penstock.pump where name = :name;

-- name: insert_ledger
insert into penstock.ledger (sink, app_id, batch_id, task, ranges, row_count, logged, committed_at)
values (:sink, :app_id, :batch_id, :task, :ranges, :row_count, :logged, :now)
on conflict (sink, app_id, batch_id, task) do nothing;

-- name: insert_staged
insert into penstock.staged
    (app_id, batch_id, attempt, task, ordinal, queue_id, segments, bytes, segment_list, created_at)
values
    (:app_id, :batch_id, :attempt, :task, :ordinal, :queue_id, :segments, :bytes, :segment_list, :now);

-- A repeated append records its objects again. Returns nothing if another object has the same id.
-- name: insert_object
insert into penstock.object as o (object_id, suffix, queue_id, size, created_at)
values (:object_id, :suffix, :queue_id, :size, :now)
on conflict (queue_id, object_id) do update set created_at = excluded.created_at, unused_at = null
where o.suffix = excluded.suffix
returning object_id, created_at, (select uuid from penstock.store) as store;

-- One page of a range: the segments from the one that holds row `start`, each with the partition's first row index. The reader stops
-- when it has enough bytes.
-- name: read_page
select
    s.start_index, s.end_index, s.first_append, s.last_append, s.first_timestamp, s.last_timestamp, s.bytes,
    s.payload_id, p.data, s.columns_id, case when :with_runs = 1 then p.runs end as runs, t.first_index,
    s.object_id, o.suffix, s.start_byte, s.checksum
from penstock.partition as t
cross join penstock.segment as s
left join penstock.payload as p on p.payload_id = s.payload_id
left join penstock.object as o on o.queue_id = :queue_id and o.object_id = s.object_id
where t.queue_id = :queue_id and t.partition = :partition and s.queue_id = :queue_id and s.partition = :partition and s.end_index > :start_index
    and s.end_index <= (
        select min(end_index) from penstock.segment
        where queue_id = :queue_id and partition = :partition and end_index >= :end_index
    )
order by s.end_index
limit :max_segments;

-- The partitions that are missing, end before a planned end, or have a different last row there, or may have one. The last kind comes
-- with the row's segment, whose runs say when the row was appended. :last_rows has for each partition the end, when the row before it
-- was appended, or null, and the last_timestamp of the segment in which that row was found before, or null. The caller reads the runs
-- by their payloads, as many as fit into memory.
-- name: other_rows
select planned.partition, s.start_index, s.last_timestamp,
    case when d.runs is not null then d.payload_id end as runs_of, length(d.runs) as runs_size
from (
    select key as partition, json_extract(value, '$[0]') as row_end, json_extract(value, '$[1]') as last_time,
        json_extract(value, '$[2]') as known_segment
    from json_each(:last_rows)
) as planned
left join penstock.partition as p on p.queue_id = :queue_id and p.partition = planned.partition
left join penstock.segment as s on s.queue_id = :queue_id and s.partition = planned.partition and s.end_index = (
    select min(end_index) from penstock.segment
    where queue_id = :queue_id and partition = planned.partition and end_index >= row_end
)
left join penstock.payload as d on d.payload_id = s.payload_id and last_time between s.first_timestamp and s.last_timestamp
where coalesce(p.next_index, -1) < row_end or last_time is not null and s.start_index < row_end and (
    last_time not between s.first_timestamp and s.last_timestamp
    or s.first_timestamp < s.last_timestamp and known_segment is distinct from s.last_timestamp
);

-- When the row before each of :ends, pairs of partition and index, was appended; if it is inside a compacted segment, the segment's
-- runs say so. Rows that are gone are left out. The caller reads the runs as for other_rows.
-- name: row_times
select asked.partition, row_end, row_end - 1 - s.start_index as place, s.last_timestamp,
    case when d.runs is not null then d.payload_id end as runs_of, length(d.runs) as runs_size
from (
    select json_extract(value, '$[0]') as partition, json_extract(value, '$[1]') as row_end
    from json_each(:ends)
) as asked
join penstock.segment as s on s.queue_id = :queue_id and s.partition = asked.partition and s.end_index = (
    select min(end_index) from penstock.segment
    where queue_id = :queue_id and partition = asked.partition and end_index >= row_end
)
left join penstock.payload as d on d.payload_id = s.payload_id
    and row_end < s.end_index and s.first_timestamp < s.last_timestamp
where s.start_index < row_end;

-- name: runs_of
select p.payload_id, p.runs from json_each(:payload_ids) as asked cross join penstock.payload as p on p.payload_id = asked.value;

-- for monitoring

-- The partitions of :queues, a list of ids. The oldest row of each partition gets the time of the first row in its segment.
-- name: partitions_of_queues
select
    p.queue_id, p.partition, p.first_index, p.next_index, p.last_timestamp, p.bytes, p.segments,
    (
        select s.first_timestamp from penstock.segment as s
        where s.queue_id = p.queue_id and s.partition = p.partition and s.end_index > p.first_index
        order by s.end_index limit 1
    ) as oldest
from json_each(:queues) as listed
cross join penstock.partition as p
where p.queue_id = listed.value
order by p.queue_id, p.partition;

-- The offsets of :registrations, a list of pairs of consumer and queue ids, with what their partitions hold, and the segment of the
-- first unread row.
-- name: positions_of_registrations
select
    o.consumer_id, o.queue_id, o.partition, o.next_index, o.safe_index, p.first_index as log_start, p.next_index as log_end,
    p.bytes as log_bytes, s.start_index, s.end_index, s.first_timestamp, s.last_timestamp
from json_each(:registrations) as listed
cross join penstock.position as o
join penstock.partition as p on p.queue_id = o.queue_id and p.partition = o.partition
left join penstock.segment as s
    on s.queue_id = o.queue_id and s.partition = o.partition and s.end_index = (
        select min(n.end_index) from penstock.segment as n
        where n.queue_id = o.queue_id and n.partition = o.partition and n.end_index > o.next_index
    )
where o.consumer_id = json_extract(listed.value, '$[0]') and o.queue_id = json_extract(listed.value, '$[1]')
order by o.consumer_id, o.queue_id, o.partition;
