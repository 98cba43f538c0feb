-- Statements that differ between the databases.

-- name: store_exists
select count(*) as found
from pg_class as c
join pg_namespace as n on n.oid = c.relnamespace
where n.nspname = :schema and c.relname = 'store';

-- name: schema_exists
select count(*) as found from pg_namespace where nspname = :schema;

-- A role that owns the schema, one of the relations, or a partition or child of one, and is neither this session's own, nor a
-- superuser, nor the database's owner, nor one of :trusted. Relations that do not exist are ignored. A role is not trusted because the
-- session's role is a member of it: an administrator of a role can make anyone a member.
-- name: foreign_owner
with recursive used (oid) as (
    select c.oid
    from pg_class as c
    join pg_namespace as n on n.oid = c.relnamespace
    where n.nspname = :schema and c.relname = any(cast(:relations as text[]))
    union
    select i.inhrelid from pg_inherits as i join used on i.inhparent = used.oid
), owned (owner, what) as (
    select n.nspowner, null from pg_namespace as n where n.nspname = :schema and cast(:with_schema as boolean)
    union all
    select c.relowner, cast(cast(c.oid as regclass) as text)
    from pg_class as c
    join used on used.oid = c.oid
)
select cast(r.rolname as text) as owner, owned.what, cast(current_user as text) as role
from owned
join pg_roles as r on r.oid = owned.owner
where not r.rolsuper
    and r.rolname <> all(cast(:trusted as text[]))
    and r.rolname not in (current_user, session_user)
    and r.oid not in (select datdba from pg_database where datname = current_database())
order by owned.what nulls first
limit 1;

-- name: may_identify_system
select has_function_privilege('pg_control_system()', 'execute') as may;

-- name: identify_system
select system_identifier::text as system from pg_control_system();

-- In a copy made with CREATE DATABASE ... TEMPLATE, the table has the same number, and the database another one.
-- name: identify_table
select 'penstock.store'::regclass::oid::bigint as number,
    (select oid::bigint from pg_database where datname = current_database()) as database;

-- name: clock
select (extract(epoch from clock_timestamp()) * 1000000)::bigint as now;

-- Which of some owner locks are held. Any role that may connect can hold any advisory lock, so sessions that could not move a consumer
-- anyway are ignored. A session may use the rights of every role that its own role is a member of.
-- name: advisory_holders
select distinct wanted.high, wanted.low
from unnest(:high::bigint[], :low::bigint[]) as wanted (high, low)
join pg_locks as l on l.classid::bigint = wanted.high and l.objid::bigint >> 20 = wanted.low
where l.locktype = 'advisory' and l.granted and l.objsubid = 1
    and l.pid is distinct from :but_for::integer
    and l.database = (select oid from pg_database where datname = current_database())
    and not exists (
        select from pg_stat_activity as a
        where a.pid = l.pid and not exists (
            select from pg_roles as r
            where pg_has_role(a.usesysid, r.oid, 'member') and has_table_privilege(r.oid, 'penstock.registration', 'update')
        )
    );

-- The sessions that hold the lock that a session waits for. Sessions that wait themselves are left out.
-- name: lock_holders
with recursive ahead (pid) as (
    select unnest(pg_blocking_pids(:pid::integer))
    union
    select unnest(pg_blocking_pids(ahead.pid)) from ahead
)
select
    a.pid, a.usename::text as user_name, a.application_name, a.state,
    extract(epoch from clock_timestamp() - a.state_change)::float8 as seconds
from ahead
join pg_stat_activity as a on a.pid = ahead.pid
where cardinality(pg_blocking_pids(a.pid)) = 0
order by a.pid;

-- A relation may be dropped by its owner and the schema's owner. Comments longer than Penstock writes, which other programs may have
-- written, are not read.
-- name: list_relations
select
    c.relname as name,
    case when octet_length(obj_description(c.oid, 'pg_class')) <= 65536 then obj_description(c.oid, 'pg_class') end as comment,
    pg_has_role(c.relowner, 'usage') or pg_has_role(n.nspowner, 'usage') as droppable
from pg_class as c
join pg_namespace as n on n.oid = c.relnamespace
where n.nspname = :schema and c.relkind = 'r' and c.relpersistence = 'u' and starts_with(c.relname, 'staged_rows_');

-- A block is 4096 payload ids, so that one call serves one append.
-- name: allocate_block
select nextval('penstock.payload_block') as block;

-- name: allocate_block_all
select nextval('penstock.payload_block') as block from unnest(:place::bigint[]);

-- A watch shares this lock, which its connection holds, and listens to the channel.
-- name: watch_channel
select 'penstock_' || 'penstock.partition'::regclass::oid || '_' || :queue_id as channel;

-- name: hold_watch
select pg_try_advisory_lock_shared('penstock.partition'::regclass::oid::integer, (:queue_id & 2147483647)::integer) as held;

-- A transaction id above those of all running transactions.
-- name: newest_transaction
select pg_current_xact_id()::text::bigint as newest;

-- name: oldest_transaction
select pg_snapshot_xmin(pg_current_snapshot())::text::bigint as oldest;

-- Append one segment in one round trip. The update takes the partition's row lock and holds it until the commit; the payload's id is
-- drawn under it. Timestamps grow from one append to the next, by :gap if the clock has not advanced. Under the lock the statement
-- checks whether the queue is watched, that is, whether the watches' lock is taken, and returns the channel to notify. It appends nothing
-- if :columns, the id of later columns that the row has, is not among those of the queue.
-- name: append_segment
with placed as (
    update penstock.partition
    set next_index = next_index + :row_count,
        bytes = bytes + :bytes,
        segments = segments + 1,
        last_timestamp = case
            when (extract(epoch from clock_timestamp()) * 1000000)::bigint > last_timestamp
                then (extract(epoch from clock_timestamp()) * 1000000)::bigint
            else last_timestamp + :gap
        end,
        last_clock = case when (extract(epoch from clock_timestamp()) * 1000000)::bigint > last_timestamp
        then (extract(epoch from clock_timestamp()) * 1000000)::bigint else last_clock end
    where queue_id = :queue_id and partition = :partition and (
        :columns::bytea is null
        or exists (select from penstock.queue as q where q.queue_id = :queue_id and position(:columns::bytea in q.added_columns) > 0)
    )
    returning
        next_index, last_timestamp, segments, total, nextval('penstock.payload_block') * 4096 as payload_id,
        case
            when not pg_try_advisory_lock(tableoid::integer, (queue_id & 2147483647)::integer)
                then 'penstock_' || tableoid || '_' || queue_id
            when pg_advisory_unlock(tableoid::integer, (queue_id & 2147483647)::integer) then null
        end as channel
), stored as (
    insert into penstock.payload (payload_id, data) select payload_id, :data from placed
), published as (
    insert into penstock.segment
        (queue_id, partition, start_index, end_index, first_append, last_append, first_timestamp, last_timestamp,
         bytes, columns_id, payload_id)
    select
        :queue_id, :partition, next_index - :row_count, next_index, payload_id, payload_id, last_timestamp,
        last_timestamp, :bytes, :columns_id, payload_id
    from placed
)
select next_index, last_timestamp, segments, total, channel from placed;

-- Statements with _all do the same as those without it, for many rows in one message: parameters that differ between rows are arrays.
-- In a pipeline of many messages, a client that is suspended between two of them would keep its locks, since the server sets no limit
-- there. The rows are materialized with the leading columns of the key: with constants instead, the planner may compare each row with
-- all rows of the queue as long as it has no statistics about the table.

-- Makes stored rows visible as one append. :partition, ascending, :row_count, :bytes and :segments are what each partition gets;
-- :place (among those partitions), :rows_before (in the partition), :segment_rows and the following ones are the segments; -1 and the numbers
-- that a shorter array lacks stand for null. The update locks the partitions in ascending order, that of the index. The append's id is
-- drawn once, when all of them are locked, so that the ids ascend in each of them. The clock is read once, before that: rows are dated
-- after earlier ones anyway. Arrays are read by position: a join takes twice as long.
-- name: publish_segments
with once as materialized (
    select (extract(epoch from clock_timestamp()) * 1000000)::bigint as clock
), moved as (
    update penstock.partition as p
    set next_index = p.next_index + (:row_count::bigint[])[width_bucket(p.partition, :partition::bigint[])],
        bytes = p.bytes + (:bytes::bigint[])[width_bucket(p.partition, :partition::bigint[])],
        segments = p.segments + (:segments::bigint[])[width_bucket(p.partition, :partition::bigint[])],
        last_timestamp = case when clock > p.last_timestamp then clock else p.last_timestamp + :gap end,
        last_clock = case when clock > p.last_timestamp then clock else p.last_clock end
    from once
    where p.queue_id = :queue_id and p.partition = any(:partition::bigint[])
    returning p.partition, p.next_index, p.last_timestamp, p.segments, p.total, p.tableoid as relation
), heads as materialized (
    select
        array_agg(next_index) as next_index, array_agg(segments) as segments, array_agg(last_timestamp) as last_timestamp,
        count(*) as partitions, min(total) as least_total, max(total) as most_total, min(relation) as relation
    from (select * from moved order by partition) as ordered
), locked as materialized (
    select
        heads.*, nextval('penstock.payload_block') * 4096 as append_id,
        case
            when not pg_try_advisory_lock(relation::integer, (:queue_id & 2147483647)::integer)
                then 'penstock_' || relation || '_' || :queue_id::bigint
            when pg_advisory_unlock(relation::integer, (:queue_id & 2147483647)::integer) then null
        end as channel
    from heads
), published as (
    insert into penstock.segment
        (queue_id, partition, start_index, end_index, first_append, last_append, first_timestamp, last_timestamp,
         bytes, columns_id, payload_id, object_id, start_byte, checksum)
    select
        :queue_id, (:partition::bigint[])[place], next_index[place] - (:row_count::bigint[])[place] + rows_before,
        next_index[place] - (:row_count::bigint[])[place] + rows_before + row_count,
        append_id, append_id, last_timestamp[place], last_timestamp[place], bytes, columns_id,
        nullif(payload_id, -1), nullif(object_id, -1), nullif(start_byte, -1), nullif(checksum, -1)
    from locked, unnest(
        :place::bigint[], :rows_before::bigint[], :segment_rows::bigint[], :segment_bytes::bigint[], :columns_id::bigint[],
        :payload_id::bigint[], :object_id::bigint[], :start_byte::bigint[], :checksum::bigint[]
    ) as segment (place, rows_before, row_count, bytes, columns_id, payload_id, object_id, start_byte, checksum)
    where partitions = cardinality(:partition::bigint[])
)
select next_index, segments, partitions, least_total, most_total, channel from locked;

-- Without runs, which only compacted segments have; those are inserted one at a time.
-- name: insert_payload_all
insert into penstock.payload (payload_id, data) select * from unnest(:payload_id::bigint[], :data::bytea[]);

-- :partition ascends. Arrays are read by position: a join takes twice as long.
-- name: advance_position_all
update penstock.position as p
set next_index = (:new::bigint[])[width_bucket(p.partition, :partition::bigint[])],
    safe_index = greatest(p.safe_index, (:safe::bigint[])[width_bucket(p.partition, :partition::bigint[])])
where p.consumer_id = :consumer_id and p.queue_id = :queue_id and p.partition = any(:partition::bigint[])
    and p.next_index = (:old::bigint[])[width_bucket(p.partition, :partition::bigint[])];

-- name: raise_safe_all
with new as materialized (
    select :consumer_id::bigint as consumer_id, :queue_id::bigint as queue_id, given.*
    from unnest(:partition::bigint[], :safe_index::bigint[]) as given (partition, safe_index)
)
update penstock.position as p
set safe_index = new.safe_index, next_index = greatest(p.next_index, new.safe_index)
from new
where p.consumer_id = new.consumer_id and p.queue_id = new.queue_id and p.partition = new.partition
    and p.safe_index < new.safe_index;

-- name: insert_mark_all
insert into penstock.mark (source, partition, app_id, next_index)
select :source, new.partition, :app_id, new.to_index
from unnest(:partition::bigint[], :new::bigint[]) as new (partition, to_index)
on conflict (source, partition) do nothing;

-- name: advance_mark_all
with new as materialized (
    select :source::text as source, given.*
    from unnest(:partition::bigint[], :old::bigint[], :new::bigint[]) as given (partition, from_index, to_index)
)
update penstock.mark as m set next_index = new.to_index, app_id = :app_id
from new
where m.source = new.source and m.partition = new.partition and m.next_index = new.from_index;

-- name: insert_partition_all
insert into penstock.partition (queue_id, partition, total)
select :queue_id, new.partition, :total from unnest(:partition::bigint[]) as new (partition);

-- name: delete_segment_all
delete from penstock.segment
where queue_id = :queue_id and partition = :partition and end_index = any(:end_index::bigint[]);

-- name: delete_payload_all
delete from penstock.payload where payload_id = any(:payload_id::bigint[]);

-- name: insert_feed_commit_all
insert into penstock.feed_commit (queue_id, version, timestamp, row_count, ends)
select :queue_id, new.version, new.timestamp, new.row_count, new.ends
from unnest(:version::bigint[], :timestamp::bigint[], :row_count::bigint[], :ends::text[])
    as new (version, timestamp, row_count, ends);

-- name: insert_position_all
insert into penstock.position (consumer_id, queue_id, partition, next_index, safe_index)
select :consumer_id, :queue_id, new.partition, new.next_index, new.next_index
from unnest(:partition::bigint[], :next_index::bigint[]) as new (partition, next_index)
on conflict (consumer_id, queue_id, partition) do nothing;

-- name: set_position_all
with new as materialized (
    select :consumer_id::bigint as consumer_id, :queue_id::bigint as queue_id, given.*
    from unnest(:partition::bigint[], :next_index::bigint[]) as given (partition, next_index)
)
update penstock.position as p set next_index = new.next_index, safe_index = new.next_index
from new
where p.consumer_id = new.consumer_id and p.queue_id = new.queue_id and p.partition = new.partition;

-- References to the row are not blocked.
-- name: lock_registration
select r.*, c.name as consumer, q.name as queue
from penstock.registration as r
join penstock.consumer as c on c.consumer_id = r.consumer_id
join penstock.queue as q on q.queue_id = r.queue_id
where c.name = :consumer and q.name = :queue
for no key update of r;

-- name: lock_registrations
select r.*, c.name as consumer, q.name as queue
from penstock.registration as r
join penstock.consumer as c on c.consumer_id = r.consumer_id
join penstock.queue as q on q.queue_id = r.queue_id
where r.queue_id = :queue_id
order by c.name
for no key update of r;

-- name: lock_partitions
select partition, first_index, next_index, last_timestamp, last_clock, bytes, segments
from penstock.partition where queue_id = :queue_id order by partition for update;

-- name: lock_partition
select partition, first_index, next_index, last_timestamp, last_clock, bytes, segments
from penstock.partition where queue_id = :queue_id and partition = :partition for update;

-- Blocks references to the row, so that no registration and no session begins.
-- name: lock_queue
select * from penstock.queue where name = :name for update;

-- name: lock_pump
select name, owner, epoch, alive_at, version, timestamp, part_version, part_rows, state
from penstock.pump where name = :name for update;

-- name: insert_ledger
insert into penstock.ledger (sink, app_id, batch_id, task, ranges, row_count, logged, committed_at)
values (:sink, :app_id, :batch_id, :task, :ranges, :row_count, :logged, coalesce(:now::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint))
on conflict (sink, app_id, batch_id, task) do nothing;

-- name: insert_staged
insert into penstock.staged
    (app_id, batch_id, attempt, task, ordinal, queue_id, segments, bytes, segment_list, created_at)
values
    (:app_id, :batch_id, :attempt, :task, :ordinal, :queue_id, :segments, :bytes, :segment_list,
     coalesce(:now::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint));

-- name: insert_staged_object_all
insert into penstock.staged_object (object_id, app_id, batch_id, attempt, ordinal)
select new.object_id, :app_id, :batch_id, :attempt, :ordinal from unnest(:object_id::bigint[]) as new (object_id);

-- A repeated append records its objects again. Returns nothing if another object has the same id.
-- name: insert_object
insert into penstock.object as o (object_id, suffix, queue_id, size, created_at)
values (:object_id, :suffix, :queue_id, :size, coalesce(:now::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint))
on conflict (queue_id, object_id) do update set created_at = excluded.created_at, unused_at = null
where o.suffix = excluded.suffix
returning object_id, created_at, (select uuid from penstock.store) as store;

-- name: insert_object_all
insert into penstock.object as o (object_id, suffix, queue_id, size, created_at)
select
    new.object_id, new.suffix, :queue_id, new.size,
    coalesce(:now::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
from unnest(:object_id::bigint[], :suffix::bigint[], :size::bigint[]) as new (object_id, suffix, size)
on conflict (queue_id, object_id) do update set created_at = excluded.created_at, unused_at = null
where o.suffix = excluded.suffix
returning object_id, created_at, (select uuid from penstock.store) as store;

-- One page of a range: the segments from the one that holds row `start`, while their payloads stay within max_bytes, each
-- with the partition's first row index. Another program may have written the column bytes, so the payloads are measured, too.
-- name: read_page
select
    s.start_index, s.end_index, s.first_append, s.last_append, s.first_timestamp, s.last_timestamp, s.bytes,
    s.payload_id, s.data, s.columns_id, case when :with_runs = 1 then s.runs end as runs, t.first_index,
    s.object_id, o.suffix, s.start_byte, s.checksum
from (
    select
        claimed.*, p.data, p.runs,
        sum(coalesce(octet_length(p.data), claimed.bytes) + coalesce(octet_length(p.runs), 0))
            over (order by claimed.end_index)
            - coalesce(octet_length(p.data), claimed.bytes) - coalesce(octet_length(p.runs), 0) as size_before
    from (
        select *, sum(bytes) over (order by end_index) - bytes as bytes_before
        from (
            select * from penstock.segment
            where queue_id = :queue_id and partition = :partition and end_index > :start_index
                and end_index <= (
                    select min(end_index) from penstock.segment
                    where queue_id = :queue_id and partition = :partition and end_index >= :end_index
                )
            order by end_index
            limit :max_segments
        ) as ahead
    ) as claimed
    left join penstock.payload as p on p.payload_id = claimed.payload_id
    where claimed.bytes_before < :max_bytes
) as s
join penstock.partition as t on t.queue_id = :queue_id and t.partition = :partition
left join penstock.object as o on o.queue_id = :queue_id and o.object_id = s.object_id
where s.size_before < :max_bytes
order by s.end_index;

-- The partitions that are missing, end before a planned end, or have a different last row there, or may have one. The last kind comes
-- with the row's segment, whose runs say when the row was appended. :last_rows has for each partition the end, when the row before it
-- was appended, or null, and the last_timestamp of the segment in which that row was found before, or null. The caller reads the runs
-- by their payloads, as many as fit into memory.
-- name: other_rows
select planned.partition, s.start_index, s.last_timestamp,
    case when d.runs is not null then d.payload_id end as runs_of, octet_length(d.runs) as runs_size
from (
    select number - 1 as partition, cast(value ->> 0 as bigint) as row_end, cast(value ->> 1 as bigint) as last_time,
        cast(value ->> 2 as bigint) as known_segment
    from jsonb_array_elements(cast(:last_rows as jsonb)) with ordinality as each (value, number)
) as planned
left join lateral (
    select next_index from penstock.partition where queue_id = :queue_id and partition = planned.partition limit 1
) as p on true
left join lateral (
    select * from penstock.segment
    where queue_id = :queue_id and partition = planned.partition and end_index >= row_end
    order by end_index
    limit 1
) as s on true
left join penstock.payload as d on d.payload_id = s.payload_id and last_time between s.first_timestamp and s.last_timestamp
where coalesce(p.next_index, -1) < row_end or last_time is not null and s.start_index < row_end and (
    last_time not between s.first_timestamp and s.last_timestamp
    or s.first_timestamp < s.last_timestamp and known_segment is distinct from s.last_timestamp
);

-- When the row before each of :ends, pairs of partition and index, was appended; if it is inside a compacted segment, the segment's
-- runs say so. Rows that are gone are left out. The caller reads the runs as for other_rows.
-- name: row_times
select asked.partition, row_end, row_end - 1 - s.start_index as place, s.last_timestamp,
    case when d.runs is not null then d.payload_id end as runs_of, octet_length(d.runs) as runs_size
from (
    select cast(value ->> 0 as integer) as partition, cast(value ->> 1 as bigint) as row_end
    from jsonb_array_elements(cast(:ends as jsonb)) as each (value)
) as asked
cross join lateral (
    select * from penstock.segment
    where queue_id = :queue_id and partition = asked.partition and end_index >= row_end
    order by end_index
    limit 1
) as s
left join penstock.payload as d on d.payload_id = s.payload_id
    and row_end < s.end_index and s.first_timestamp < s.last_timestamp
where s.start_index < row_end;

-- name: runs_of
select p.payload_id, p.runs
from jsonb_array_elements_text(cast(:payload_ids as jsonb)) as asked (value)
cross join lateral (select * from penstock.payload where payload_id = cast(asked.value as bigint) limit 1) as p;

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
from jsonb_array_elements(cast(:queues as jsonb)) as listed (queue_id)
cross join penstock.partition as p
where p.queue_id = cast(listed.queue_id as bigint)
order by p.queue_id, p.partition;

-- The offsets of :registrations, a list of pairs of consumer and queue ids, with what their partitions hold, and the segment of the
-- first unread row.
-- name: positions_of_registrations
select
    o.consumer_id, o.queue_id, o.partition, o.next_index, o.safe_index, p.first_index as log_start, p.next_index as log_end,
    p.bytes as log_bytes, s.start_index, s.end_index, s.first_timestamp, s.last_timestamp
from jsonb_array_elements(cast(:registrations as jsonb)) as listed (pair)
cross join penstock.position as o
join penstock.partition as p on p.queue_id = o.queue_id and p.partition = o.partition
left join penstock.segment as s
    on s.queue_id = o.queue_id and s.partition = o.partition and s.end_index = (
        select min(n.end_index) from penstock.segment as n
        where n.queue_id = o.queue_id and n.partition = o.partition and n.end_index > o.next_index
    )
where o.consumer_id = cast(listed.pair -> 0 as bigint) and o.queue_id = cast(listed.pair -> 1 as bigint)
order by o.consumer_id, o.queue_id, o.partition;
