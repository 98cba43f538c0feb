-- Statements that are the same for both databases. `penstock.` stands for the store's schema, and `:name` for a parameter.

-- name: read_store
select uuid, version, payloads from penstock.store;

-- name: insert_store
insert into penstock.store (uuid, version, created_at) values (:uuid, :version, :now);

-- queues

-- name: insert_queue
insert into penstock.queue
    (queue_id, name, schema, key_columns, partitions, retention_rows, retention_age, retention_bytes, contract, payloads,
     created_at)
values
    (:queue_id, :name, :schema, :key_columns, :partitions, :retention_rows, :retention_age, :retention_bytes, :contract, :payloads,
     :now)
on conflict (name) do nothing
returning queue_id;

-- name: set_store_payloads
update penstock.store set payloads = :payloads;

-- name: find_queue
select * from penstock.queue where name = :name;

-- name: find_queue_by_id
select * from penstock.queue where queue_id = :queue_id;

-- name: list_queues
select queue_id, name, created_at from penstock.queue order by name;

-- For the monitor page and lists, which need neither the contract nor a long schema. Texts and rows are limited, since programs with
-- write access can write long texts and many rows. `total` is the number without the limit.
-- name: outline_queues
select
    q.queue_id, substr(q.name, 1, 300) as name, case when length(q.schema) <= 4096 then q.schema end as schema,
    case when length(q.added_columns) <= 4096 then q.added_columns end as added_columns,
    substr(q.key_columns, 1, 4000) as key_columns, q.partitions, q.retention_rows, q.retention_age, q.retention_bytes,
    cast(null as text) as contract, substr(q.payloads, 1, 1100) as payloads, q.created_at,
    (select count(*) from penstock.partition as p where p.queue_id = q.queue_id) as partition_rows,
    (select count(*) from penstock.registration as r where r.queue_id = q.queue_id) as registrations,
    (select count(*) from penstock.queue as a) as total
from penstock.queue as q order by q.name limit :most;

-- name: insert_partition
insert into penstock.partition (queue_id, partition, total) values (:queue_id, :partition, :total);

-- Writes every row, so that no append that began with the old number can commit.
-- name: set_total
update penstock.partition set total = :total where queue_id = :queue_id;

-- name: set_partitions
update penstock.queue set partitions = :partitions where queue_id = :queue_id;

-- name: set_added_columns
update penstock.queue set added_columns = :columns where queue_id = :queue_id;

-- name: set_retention
update penstock.queue
set retention_rows = :retention_rows, retention_age = :retention_age, retention_bytes = :retention_bytes
where queue_id = :queue_id;

-- name: delete_registrations
delete from penstock.registration where queue_id = :queue_id;

-- name: delete_producers
delete from penstock.producer where queue_id = :queue_id;

-- name: delete_queue_payloads
delete from penstock.payload where payload_id in (
    select payload_id from penstock.segment where queue_id = :queue_id
);

-- name: delete_queue_segments
delete from penstock.segment where queue_id = :queue_id;

-- name: delete_queue_staged
delete from penstock.staged where queue_id = :queue_id
returning segments, segment_list;

-- name: keep_dropped_payloads
insert into penstock.dropped_payloads (queue_id, payloads, dropped_at)
select queue_id, payloads, :now from penstock.queue where queue_id = :queue_id and payloads is not null;

-- name: delete_queue
delete from penstock.queue where queue_id = :queue_id;

-- name: insert_key_home
insert into penstock.key_home (queue_id, partitions, hashes) values (:queue_id, :partitions, :hashes);

-- name: read_key_homes
-- Values longer than Penstock writes, which other programs may have written, are not read.
select partitions, case when length(hashes) <= 16777216 then hashes end as hashes
from penstock.key_home where queue_id = :queue_id order by partitions;

-- name: store_totals
select
    coalesce(sum(cast(next_index - first_index as double precision)), 0) as row_count,
    coalesce(sum(cast(bytes as double precision)), 0) as bytes
from penstock.partition;

-- change feeds

-- name: insert_feed_commit
insert into penstock.feed_commit (queue_id, version, timestamp, row_count, ends)
values (:queue_id, :version, :timestamp, :row_count, :ends);

-- name: feed_commit_upto
select version, timestamp, row_count, ends from penstock.feed_commit
where queue_id = :queue_id and version <= :version order by version desc limit 1;

-- name: read_feed_commits
select version, timestamp, row_count, ends from penstock.feed_commit
where queue_id = :queue_id and version > :after and version <= :upto order by version limit :most;

-- name: delete_feed_commits
delete from penstock.feed_commit where queue_id = :queue_id and version < :version;

-- the log

-- name: read_partitions
select partition, first_index, next_index, last_timestamp, last_clock, bytes, segments
from penstock.partition where queue_id = :queue_id order by partition;

-- name: read_partition
select partition, first_index, next_index, last_timestamp, last_clock, bytes, segments
from penstock.partition where queue_id = :queue_id and partition = :partition;

-- Where the partitions of a range end, for watches.
-- name: read_ends
select partition, next_index, total from penstock.partition
where queue_id = :queue_id and partition >= :first and partition <= :last
order by partition;

-- name: insert_payload
insert into penstock.payload (payload_id, runs, data) values (:payload_id, :runs, :data);

-- -1 stands for null.
-- name: insert_segment
insert into penstock.segment
    (queue_id, partition, start_index, end_index, first_append, last_append, first_timestamp, last_timestamp,
     bytes, columns_id, payload_id, object_id, start_byte, checksum)
values
    (:queue_id, :partition, :start_index, :end_index, :first_append, :last_append, :first_timestamp,
     :last_timestamp, :bytes, :columns_id, nullif(:payload_id, -1), nullif(:object_id, -1), nullif(:start_byte, -1),
     nullif(:checksum, -1));

-- The segments of a range without their rows.
-- name: read_segments
select start_index, end_index, first_append, last_append, first_timestamp, last_timestamp, bytes, payload_id, object_id, start_byte
from penstock.segment
where queue_id = :queue_id and partition = :partition and end_index > :start_index
order by end_index
limit :max_segments;

-- The newest segments first, without their rows.
-- name: read_last_segments
select start_index, end_index, first_append, last_append, first_timestamp, last_timestamp, bytes, payload_id, object_id, start_byte
from penstock.segment
where queue_id = :queue_id and partition = :partition
order by end_index desc
limit :max_segments;

-- name: segment_at
select start_index, end_index, first_append, last_append, first_timestamp, last_timestamp, payload_id
from penstock.segment
where queue_id = :queue_id and partition = :partition and end_index > :row_index
order by end_index
limit 1;

-- The segment of a row, with its runs if it is compacted.
-- name: appends_at
select s.start_index, s.end_index, s.first_append, s.last_append, p.runs
from (
    select * from penstock.segment
    where queue_id = :queue_id and partition = :partition and end_index > :row_index
    order by end_index
    limit 1
) as s
left join penstock.payload as p on p.payload_id = s.payload_id;

-- name: read_payload
select data from penstock.payload where payload_id = :payload_id;

-- name: bytes_after
select coalesce(sum(cast(bytes as double precision)), 0) as bytes
from penstock.segment
where queue_id = :queue_id and partition = :partition and end_index > :row_index;

-- name: delete_payloads_before
delete from penstock.payload where payload_id in (
    select payload_id from penstock.segment
    where queue_id = :queue_id and partition = :partition and end_index <= :row_index
);

-- name: delete_segments_before
delete from penstock.segment
where queue_id = :queue_id and partition = :partition and end_index <= :row_index
returning bytes;

-- name: set_first_index
update penstock.partition
set first_index = :first_index, bytes = bytes - :bytes, segments = segments - :segments
where queue_id = :queue_id and partition = :partition and first_index <= :first_index;

-- Rows that are dated ahead of the clock.
-- name: newest_observed_end
select observed_at, next_index from penstock.observed_end
where queue_id = :queue_id and partition = :partition and observed_at <= :now and last_clock = :last_clock
order by observed_at desc
limit 1;

-- name: observed_end_before
select max(next_index) as next_index from penstock.observed_end
where queue_id = :queue_id and partition = :partition and observed_at < :timestamp and last_clock = :last_clock;

-- Of the ends recorded before the retention's age, only the newest is needed.
-- name: forget_observed_ends
delete from penstock.observed_end
where queue_id = :queue_id and partition = :partition and (
    last_clock <> :last_clock or observed_at > :now or observed_at < (
        select max(o.observed_at) from penstock.observed_end as o
        where o.queue_id = :queue_id and o.partition = :partition and o.observed_at < :expired
    )
);

-- name: insert_observed_end
insert into penstock.observed_end (queue_id, partition, observed_at, next_index, last_clock)
values (:queue_id, :partition, :now, :next_index, :last_clock)
on conflict (queue_id, partition, observed_at) do nothing;

-- name: delete_segment
delete from penstock.segment
where queue_id = :queue_id and partition = :partition and end_index = :end_index;

-- name: delete_payload
delete from penstock.payload where payload_id = :payload_id;

-- name: account_merge
update penstock.partition set bytes = bytes + :bytes, segments = segments + :segments
where queue_id = :queue_id and partition = :partition;

-- objects

-- name: queues_with_objects
select queue_id, payloads, name, 0 as dropped from penstock.queue where payloads is not null
union all
select queue_id, payloads, cast(null as text), 1 from penstock.dropped_payloads
order by queue_id;

-- name: insert_location
insert into penstock.location (payloads, cleaned_at, instance) values (:payloads, :now, :instance) on conflict (payloads) do nothing;

-- The store, and the location if the store has recorded it.
-- name: find_location
select s.uuid, l.instance, l.refused_at from penstock.store as s left join penstock.location as l on l.payloads = :payloads;

-- name: own_location
update penstock.location set instance = :instance, refused_at = null where payloads = :payloads;

-- name: refuse_location
update penstock.location set refused_at = :now where payloads = :payloads and refused_at is null;

-- name: begin_cleaning
update penstock.location set cleaned_at = :now where payloads = :payloads and (cleaned_at <= :before or cleaned_at > :now);

-- name: insert_cleaning
insert into penstock.cleaning (payloads, token, begun_at, taken_over) values (:payloads, :token, :now, :taken_over);

-- name: settle_cleaning
update penstock.cleaning set settled_at = :now where payloads = :payloads and token = :token;

-- The tokens of all locations, since one location may be written in several ways.
-- name: list_cleanings
select token, begun_at, settled_at from penstock.cleaning;

-- name: forget_cleanings
delete from penstock.cleaning where payloads = :payloads and begun_at < :before and taken_over = 0 and settled_at is not null;

-- name: forget_cleaning
delete from penstock.cleaning where payloads = :payloads and token = :token;

-- name: list_locations
select payloads from penstock.location
union
select payloads from penstock.store where payloads is not null;

-- name: mark_unused
update penstock.object set unused_at = :now
where queue_id = :queue_id and object_id in (
    select o.object_id from penstock.object as o
    where o.queue_id = :queue_id and o.unused_at is null
        and not exists (
            select 1 from penstock.segment as s where s.object_id = o.object_id
            union all
            select 1 from penstock.staged_object as s where s.object_id = o.object_id
        )
    limit :most
);

-- name: mark_used
update penstock.object set unused_at = null
where queue_id = :queue_id and object_id in (
    select o.object_id from penstock.object as o
    where o.queue_id = :queue_id and o.unused_at is not null
        and exists (
            select 1 from penstock.segment as s where s.object_id = o.object_id
            union all
            select 1 from penstock.staged_object as s where s.object_id = o.object_id
        )
);

-- name: delete_unused
delete from penstock.object
where queue_id = :queue_id and object_id in (
    select o.object_id from penstock.object as o
    where o.queue_id = :queue_id and o.unused_at <= :before
        and not exists (
            select 1 from penstock.segment as s where s.object_id = o.object_id
            union all
            select 1 from penstock.staged_object as s where s.object_id = o.object_id
        )
    limit :most
)
returning object_id, suffix, size;

-- name: list_objects
select object_id, suffix, size from penstock.object
where queue_id = :queue_id and object_id > :after order by object_id limit :most;

-- The objects in a range of ids that have rows.
-- name: used_objects
select o.object_id from penstock.object as o
where o.queue_id = :queue_id and o.object_id between :first and :last
    and exists (
        select 1 from penstock.segment as s where s.object_id = o.object_id
        union all
        select 1 from penstock.staged_object as s where s.object_id = o.object_id
    );

-- The segments in the objects in a range of ids.
-- name: segments_in_objects
select o.object_id, s.start_byte, s.bytes, s.checksum from penstock.object as o
join penstock.segment as s on s.object_id = o.object_id
where o.queue_id = :queue_id and o.object_id between :first and :last;

-- name: forget_dropped_payloads
delete from penstock.dropped_payloads
where queue_id = :queue_id and dropped_at <= :before
    and not exists (select 1 from penstock.object as o where o.queue_id = :queue_id);

-- staging

-- name: find_staged
select attempt, task, ordinal, segments, segment_list from penstock.staged
where app_id = :app_id and batch_id = :batch_id and queue_id = :queue_id;

-- name: insert_staged_object
insert into penstock.staged_object (object_id, app_id, batch_id, attempt, ordinal)
values (:object_id, :app_id, :batch_id, :attempt, :ordinal);

-- The deletion returns the rows, so that a concurrent cleanup and a commit never both get the same row.
-- name: delete_staged_batch
delete from penstock.staged where app_id = :app_id and batch_id <= :batch_id and queue_id = :queue_id
returning batch_id, attempt, task, ordinal, segments, segment_list;

-- name: delete_staged_from
delete from penstock.staged
where app_id = :app_id and batch_id = :batch_id and attempt = :attempt and ordinal >= :ordinal
returning segments, segment_list;

-- name: delete_staged_before
delete from penstock.staged where app_id = :app_id and (created_at < :created_at or created_at > :ahead)
returning segments, segment_list;

-- name: staged_apps
select app_id, min(created_at) as oldest, max(created_at) as newest,
    sum(cast(segments as double precision)) as segments,
    sum(cast(bytes as double precision)) as bytes
from penstock.staged group by app_id;

-- consumers

-- name: insert_consumer
insert into penstock.consumer (name, created_at) values (:name, :now)
on conflict (name) do nothing
returning consumer_id;

-- name: find_consumer
select * from penstock.consumer where name = :name;

-- name: list_consumers
select * from penstock.consumer order by name;

-- name: delete_consumer
delete from penstock.consumer where consumer_id = :consumer_id;

-- name: insert_registration
insert into penstock.registration (consumer_id, queue_id, vital, generation)
values (:consumer_id, :queue_id, :vital, :generation)
on conflict (consumer_id, queue_id) do nothing;

-- name: set_vital
update penstock.registration set vital = :vital where consumer_id = :consumer_id and queue_id = :queue_id;

-- name: delete_registration
delete from penstock.registration where consumer_id = :consumer_id and queue_id = :queue_id;

-- name: find_registration
select r.*, c.name as consumer, q.name as queue
from penstock.registration as r
join penstock.consumer as c on c.consumer_id = r.consumer_id
join penstock.queue as q on q.queue_id = r.queue_id
where c.name = :consumer and q.name = :queue;

-- Without their plans, which may be long.
-- name: list_registrations
select
    r.consumer_id, r.queue_id, r.vital, r.generation, r.epoch, r.owner, r.app_id, r.plan_epoch, cast(null as text) as plan,
    r.draining, c.name as consumer, q.name as queue
from penstock.registration as r
join penstock.consumer as c on c.consumer_id = r.consumer_id
join penstock.queue as q on q.queue_id = r.queue_id
order by c.name, q.name;

-- Plans longer than Penstock writes, which other programs may have written, are not read.
-- name: registrations_of_queue
select
    r.consumer_id, r.queue_id, r.vital, r.generation, r.epoch, r.owner, r.app_id, r.plan_epoch,
    case when length(r.plan) <= 4194304 then r.plan end as plan, r.draining, c.name as consumer, q.name as queue
from penstock.registration as r
join penstock.consumer as c on c.consumer_id = r.consumer_id
join penstock.queue as q on q.queue_id = r.queue_id
where r.queue_id = :queue_id
order by c.name;

-- name: own_registration
update penstock.registration set epoch = epoch + 1, owner = :owner, plan_epoch = null, draining = 0
where consumer_id = :consumer_id and queue_id = :queue_id
returning epoch, generation;

-- name: open_plan
update penstock.registration set plan_epoch = :epoch, plan = :plan
where consumer_id = :consumer_id and queue_id = :queue_id and epoch = :epoch;

-- name: close_plan
update penstock.registration set plan_epoch = null where consumer_id = :consumer_id and queue_id = :queue_id;

-- name: bind_app
update penstock.registration set app_id = :app_id where consumer_id = :consumer_id and queue_id = :queue_id;

-- name: new_generation
-- A generation above all earlier ones, even if the clock was set back, or if the store was restored from an older backup and another store
-- has seen later generations.
update penstock.store set last_generation = case when last_generation < :now then :now else last_generation + 1 end
where last_generation < 4611686018427387904
returning last_generation;

-- name: set_generation
update penstock.registration set generation = :generation, app_id = null, plan_epoch = null, plan = null
where consumer_id = :consumer_id and queue_id = :queue_id;

-- name: set_draining
update penstock.registration set draining = 1 where consumer_id = :consumer_id and queue_id = :queue_id;

-- name: insert_position
insert into penstock.position (consumer_id, queue_id, partition, next_index, safe_index)
values (:consumer_id, :queue_id, :partition, :next_index, :next_index)
on conflict (consumer_id, queue_id, partition) do nothing;

-- name: read_positions
select partition, next_index, safe_index from penstock.position
where consumer_id = :consumer_id and queue_id = :queue_id
order by partition;

-- name: advance_position
update penstock.position set next_index = :new, safe_index = case when safe_index < :safe then :safe else safe_index end
where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and next_index = :old;

-- name: raise_safe
update penstock.position
set safe_index = :safe_index,
    next_index = case when next_index < :safe_index then :safe_index else next_index end
where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and safe_index < :safe_index;

-- name: set_position
update penstock.position set next_index = :next_index, safe_index = :next_index
where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition;

-- name: lowest_vital
select min(p.safe_index) as safe_index
from penstock.position as p
join penstock.registration as r on r.consumer_id = p.consumer_id and r.queue_id = p.queue_id
where p.queue_id = :queue_id and p.partition = :partition and r.vital = 1;

-- producer sessions

-- name: open_producer
insert into penstock.producer as p (queue_id, session, epoch, owner, sequence)
values (:queue_id, :session, 1, :owner, -1)
on conflict (queue_id, session) do update set epoch = p.epoch + 1, owner = excluded.owner
returning epoch, sequence;

-- The update takes the session's row lock; returns nothing if the session is fenced.
-- name: lock_producer
update penstock.producer set epoch = epoch
where queue_id = :queue_id and session = :session and epoch = :epoch and owner = :owner
returning sequence;

-- name: set_sequence
update penstock.producer set sequence = :sequence where queue_id = :queue_id and session = :session;

-- name: list_producers
select session, epoch, sequence from penstock.producer where queue_id = :queue_id order by session;

-- pumps

-- name: insert_pump
insert into penstock.pump (name, owner, epoch, alive_at, version, timestamp, part_version, part_rows, state)
values (:name, '', 0, 0, :version, :timestamp, 0, 0, :state)
on conflict (name) do nothing;

-- name: find_pump
select name, owner, epoch, alive_at, version, timestamp, part_version, part_rows, state from penstock.pump where name = :name;

-- name: list_pumps
select name, owner, epoch, alive_at, version, timestamp, part_version, part_rows, state from penstock.pump order by name;

-- name: own_pump
update penstock.pump set owner = :owner, epoch = epoch + 1, alive_at = :now where name = :name and epoch = :epoch;

-- The update takes the pump's row lock; it changes nothing if another process has moved or taken over the pump.
-- name: move_pump
update penstock.pump
set version = :version, timestamp = :timestamp, part_version = :part_version, part_rows = :part_rows, alive_at = :now
where name = :name and owner = :owner and version = :old_version and part_rows = :old_rows;

-- name: beat_pump
update penstock.pump set alive_at = :now where name = :name and owner = :owner;

-- name: set_pump_state
update penstock.pump set state = :state where name = :name and owner = :owner;

-- name: release_pump
update penstock.pump set owner = '', alive_at = 0 where name = :name and owner = :owner;

-- name: delete_pump
delete from penstock.pump where name = :name;

-- ledger and marks

-- name: find_ledger
select batch_id, ranges, row_count, logged from penstock.ledger
where sink = :sink and app_id = :app_id and batch_id = :batch_id and task = :task;

-- name: newest_ledger
select batch_id, ranges, row_count, logged from penstock.ledger
where sink = :sink and app_id = :app_id and batch_id < :before and task = -1
order by batch_id desc
limit 1;

-- Only the offsets of the two newest entries are needed, and they are long with many partitions.
-- name: forget_logged
update penstock.ledger set logged = null
where sink = :sink and app_id = :app_id and batch_id between :first and :last and task = -1 and logged is not null;

-- A micro-batch with its tasks, and the one before it.
-- name: ledger_around
select batch_id, task, ranges, row_count, logged from penstock.ledger
where sink = :sink and app_id = :app_id and batch_id in (:batch_id, :batch_id - 1);

-- name: first_ledger_task
select ranges from penstock.ledger
where sink = :sink and app_id = :app_id and batch_id = :batch_id and task >= 0
order by task
limit 1;

-- The entry of the key itself is ignored, since the caller may have inserted it.
-- name: newest_batch
select l.batch_id from penstock.ledger as l
where l.sink = :sink and l.app_id = :app_id and l.batch_id > :batch_id and not exists (
    select 1 from penstock.ledger as e
    where e.sink = :sink and e.app_id = :app_id and e.batch_id <= :batch_id
    and not (e.batch_id = :batch_id and e.task = :task)
)
order by l.batch_id desc
limit 1;

-- name: prune_ledger
delete from penstock.ledger where sink = :sink and app_id = :app_id and batch_id < :batch_id;

-- name: delete_sink_ledger
delete from penstock.ledger where sink = :sink;

-- Steps from one sink to the next, as newest_commits does.
-- name: ledger_sinks
with recursive found(sink) as (
    select min(l.sink) from penstock.ledger as l
    union all
    select (select min(l.sink) from penstock.ledger as l where l.sink > found.sink)
    from found where found.sink is not null
)
select sink from found where sink is not null;

-- Apps with older entries whose newest one is old, or dated in the future.
-- name: idle_apps
with recursive
    found(sink) as (
        select min(l.sink) from penstock.ledger as l
        union all
        select (select min(l.sink) from penstock.ledger as l where l.sink > found.sink)
        from found where found.sink is not null
    ),
    app(sink, app_id) as (
        select found.sink, (select min(l.app_id) from penstock.ledger as l where l.sink = found.sink)
        from found where found.sink is not null
        union all
        select app.sink, (
            select min(l.app_id) from penstock.ledger as l where l.sink = app.sink and l.app_id > app.app_id
        )
        from app where app.app_id is not null
    ),
    newest(sink, app_id, batch_id) as (
        select app.sink, app.app_id, (
            select max(l.batch_id) from penstock.ledger as l where l.sink = app.sink and l.app_id = app.app_id
        )
        from app where app.app_id is not null
    )
select n.sink, n.app_id, n.batch_id as newest
from newest as n
where exists (
    select 1 from penstock.ledger as l
    where l.sink = n.sink and l.app_id = n.app_id and l.batch_id < n.batch_id - :keep
) and not exists (
    select 1 from penstock.ledger as l
    where l.sink = n.sink and l.app_id = n.app_id and l.batch_id = n.batch_id
        and l.committed_at >= :before and l.committed_at <= :now
)
limit :most;

-- Apps with marks and no entry in the ledger.
-- name: orphaned_mark_apps
with recursive found(sink) as (
    select min(l.sink) from penstock.ledger as l
    union all
    select (select min(l.sink) from penstock.ledger as l where l.sink > found.sink)
    from found where found.sink is not null
)
select distinct m.app_id from penstock.mark as m
where not exists (
    select 1 from found cross join penstock.ledger as l where l.sink = found.sink and l.app_id = m.app_id
)
limit :most;

-- name: delete_orphaned_marks
delete from penstock.mark where app_id = :app_id and not exists (
    with recursive found(sink) as (
        select min(l.sink) from penstock.ledger as l
        union all
        select (select min(l.sink) from penstock.ledger as l where l.sink > found.sink)
        from found where found.sink is not null
    )
    select 1 from found cross join penstock.ledger as l where l.sink = found.sink and l.app_id = :app_id
);

-- name: last_commits
select sink, app_id, max(batch_id) as batch_id, max(committed_at) as committed_at
from penstock.ledger where task = -1
group by sink, app_id
order by sink, app_id;

-- name: count_ledger
select count(*) as commits, coalesce(sum(cast(row_count as double precision)), 0) as row_count
from penstock.ledger where task = -1;

-- Holds the row's lock until the commit; changes nothing if another generation is the newest.
-- name: lock_marked_source
update penstock.marked_source set app_id = :app_id where source = :source and generation = :generation;

-- name: insert_marked_source
insert into penstock.marked_source (source, app_id, generation) values (:source, :app_id, :generation)
on conflict (source) do nothing;

-- name: raise_marked_source
update penstock.marked_source set app_id = :app_id, generation = :generation
where source = :source and generation < :generation;

-- name: delete_marks
delete from penstock.mark where source = :source;

-- name: delete_orphaned_sources
delete from penstock.marked_source as s where s.app_id = :app_id and not exists (
    select 1 from penstock.mark as m where m.source = s.source
);

-- name: insert_mark
insert into penstock.mark (source, partition, app_id, next_index) values (:source, :partition, :app_id, :new)
on conflict (source, partition) do nothing;

-- name: advance_mark
update penstock.mark set next_index = :new, app_id = :app_id
where source = :source and partition = :partition and next_index = :old;

-- name: read_marks
select partition, app_id, next_index from penstock.mark where source = :source order by partition;

-- reports of streaming queries

-- name: begin_query
insert into penstock.query
    (query_id, run_id, name, engine, state, source, sink, checkpoint, spark_ui, started_at, reported_at)
values
    (:query_id, :run_id, :name, :engine, 'running', :source, :sink, :checkpoint, :spark_ui, :started_at, :now)
on conflict (query_id) do update set
    run_id = excluded.run_id, name = excluded.name, engine = excluded.engine, state = excluded.state,
    source = excluded.source, sink = excluded.sink, checkpoint = excluded.checkpoint, spark_ui = excluded.spark_ui,
    started_at = excluded.started_at, reported_at = excluded.reported_at, rows_in = 0, rows_out = null;

-- Reports of a run that a newer run has replaced are ignored.
-- name: report_query
update penstock.query
set reported_at = :now,
    source = coalesce(source, :source),
    sink = coalesce(sink, :sink),
    rows_in = rows_in + :rows_in,
    rows_out = case when cast(:rows_out as bigint) is null then rows_out else coalesce(rows_out, 0) + :rows_out end
where query_id = :query_id and run_id = :run_id;

-- name: end_query
update penstock.query
set state = :state, reported_at = :now,
    error_condition = coalesce(:condition, error_condition),
    error_message = coalesce(:message, error_message),
    error_at = case when cast(:condition as text) is null then error_at else :now end
where query_id = :query_id and run_id = :run_id;

-- name: insert_query_progress
insert into penstock.query_progress
    (query_id, reported_at, run_id, batch_id, rows_in, rows_out, p50, p90, p99, max, duration, durations, watermark,
     finalized_until, state_rows, state_bytes, warnings)
values
    (:query_id, :now, :run_id, :batch_id, :rows_in, :rows_out, :p50, :p90, :p99, :max, :duration, :durations, :watermark,
     :finalized_until, :state_rows, :state_bytes, :warnings)
on conflict (query_id, reported_at) do nothing;

-- A report under a clock that was ahead would remain the newest for a long time.
-- name: prune_query_progress
delete from penstock.query_progress
where query_id = :query_id and (
    reported_at > :ahead or reported_at < (
        select min(reported_at) from (
            select reported_at from penstock.query_progress
            where query_id = :query_id and reported_at <= :ahead
            order by reported_at desc limit :most
        ) as kept
    )
);

-- name: drop_old_queries
delete from penstock.query where reported_at < :before;

-- The monitor page reads truncated texts, since programs with write access can write long ones.
-- name: list_reported_queries
select
    substr(query_id, 1, 65) as query_id, substr(run_id, 1, 64) as run_id, substr(name, 1, 300) as name,
    substr(engine, 1, 64) as engine, substr(state, 1, 64) as state, substr(source, 1, 300) as source,
    substr(sink, 1, 300) as sink, substr(checkpoint, 1, 300) as checkpoint, substr(spark_ui, 1, 300) as spark_ui,
    started_at, reported_at, rows_in, rows_out, substr(error_condition, 1, 300) as error_condition,
    substr(error_message, 1, 600) as error_message, error_at, (select count(*) from penstock.query as a) as total
from penstock.query order by reported_at desc limit :most;

-- The newest :skipped + 1 reports of each query, without their long texts.
-- name: progress_since
with listed as (
    select q.query_id, coalesce((
        select n.reported_at from penstock.query_progress as n
        where n.query_id = q.query_id and n.reported_at > :since and n.reported_at <= :upto
        order by n.reported_at desc
        limit 1 offset :skipped
    ), :since + 1) as first_at
    from (
        select query_id from penstock.query where reported_at > :since order by reported_at desc limit :queries
    ) as q
)
select
    substr(p.query_id, 1, 65) as query_id, p.reported_at, substr(p.run_id, 1, 64) as run_id, p.batch_id, p.rows_in, p.rows_out,
    p.p50, p.p90, p.p99, p.max, p.duration, p.watermark, p.finalized_until, p.state_rows, p.state_bytes,
    substr(p.durations, 1, 4000) like '%"triggerExecution"%' as is_micro_batch
from listed as l
cross join penstock.query_progress as p
where p.query_id = l.query_id and p.reported_at >= l.first_at and p.reported_at <= :upto
order by p.query_id, p.reported_at;

-- The long texts of the newest report of each query.
-- name: newest_progress_texts
select
    substr(p.query_id, 1, 65) as query_id, p.reported_at, substr(p.durations, 1, 4000) as durations,
    substr(p.warnings, 1, 10000) as warnings
from (
    select query_id from penstock.query where reported_at > :since order by reported_at desc limit :queries
) as q
cross join penstock.query_progress as p
where p.query_id = q.query_id and p.reported_at = (
    select max(n.reported_at) from penstock.query_progress as n
    where n.query_id = q.query_id and n.reported_at > :since and n.reported_at <= :upto
);

-- The rows that committed micro-batches wrote to a sink.
-- name: rows_committed
select cast(sum(row_count) as bigint) as row_count from penstock.ledger
where sink = :sink and app_id = :app_id and batch_id > :after and batch_id <= :upto and task = -1;

-- for monitoring

-- Consumers with their registrations, if they have any.
-- name: outline_registrations
select
    substr(c.name, 1, 300) as consumer, substr(q.name, 1, 300) as queue, r.queue_id, r.vital,
    substr(r.app_id, 1, 300) as app_id,
    (select count(*) from penstock.registration as a) + (
        select count(*) from penstock.consumer as a
        where not exists (select 1 from penstock.registration as b where b.consumer_id = a.consumer_id)
    ) as total
from penstock.consumer as c
left join penstock.registration as r on r.consumer_id = c.consumer_id
left join penstock.queue as q on q.queue_id = r.queue_id
order by c.name, q.name
limit :most;

-- The registrations with the most rows waiting; rows are counted only if there are too many registrations. They are added as floating
-- point numbers, since whole numbers that other programs have written could overflow.
-- name: registrations_most_behind
select
    b.*,
    (
        select count(*) from penstock.position as o
        where o.consumer_id = b.consumer_id and o.queue_id = b.queue_id
    ) as positions,
    (select count(*) from penstock.registration as a) as total
from (
    select
        r.consumer_id, r.queue_id, r.vital, r.epoch, substr(r.app_id, 1, 300) as app_id,
        substr(c.name, 1, 300) as consumer, substr(q.name, 1, 300) as queue,
        case when (select count(*) from penstock.registration as a) > :most then coalesce((
            select sum(
                case when p.next_index > o.next_index then cast(p.next_index as double precision) - o.next_index else 0 end
            )
            from penstock.position as o
            join penstock.partition as p on p.queue_id = o.queue_id and p.partition = o.partition
            where o.consumer_id = r.consumer_id and o.queue_id = r.queue_id
        ), 0) else 0 end as waiting
    from penstock.registration as r
    join penstock.consumer as c on c.consumer_id = r.consumer_id
    join penstock.queue as q on q.queue_id = r.queue_id
    order by waiting desc, c.name, q.name
    limit :most
) as b
order by b.waiting desc, b.consumer, b.queue;

-- The newest micro-batches. Steps from one sink and app to the next, since each may have a thousand rows.
-- name: newest_commits
with recursive
    found(sink) as (
        select min(l.sink) from penstock.ledger as l
        union all
        select (select min(l.sink) from penstock.ledger as l where l.sink > found.sink)
        from found where found.sink is not null
    ),
    app(sink, app_id) as (
        select found.sink, (select min(l.app_id) from penstock.ledger as l where l.sink = found.sink)
        from found where found.sink is not null
        union all
        select app.sink, (
            select min(l.app_id) from penstock.ledger as l where l.sink = app.sink and l.app_id > app.app_id
        )
        from app where app.app_id is not null
    )
select
    substr(l.sink, 1, 600) as sink, substr(l.app_id, 1, 300) as app_id, l.batch_id, l.row_count, l.committed_at
from app
cross join penstock.ledger as l
where l.sink = app.sink and l.app_id = app.app_id and l.task = -1 and l.batch_id > (
    -- Another program may have written a number far below zero.
    select case when max(n.batch_id) > 0 then max(n.batch_id) else 0 end
    from penstock.ledger as n
    where n.sink = app.sink and n.app_id = app.app_id
) - :most
order by l.committed_at desc, l.sink, l.app_id, l.batch_id desc
limit :most;
