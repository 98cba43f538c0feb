-- The PostgreSQL store. Names compare byte by byte, as in SQLite, whatever the database's collation.
-- last_generation is the newest generation of any registration. payloads is where new queues keep their large payloads, if not in the
-- database.
create table penstock.store (
    uuid            text   not null primary key,
    version         bigint not null,
    created_at      bigint not null,
    last_generation bigint not null default 0,
    payloads        text
);

-- A value stands for a block of 4096 payload ids.
create sequence penstock.payload_block;

-- queue_id is random, so that a queue that was dropped and recreated, or was created after its store was restored from a backup, is a
-- different one. added_columns are columns that were added later, and wider types of earlier columns, each with a random id.
-- contract is the contract of a change feed, as JSON. payloads is where the queue's large payloads are, if not in the database.
create table penstock.queue (
    queue_id        bigint not null primary key,
    name            text collate "C" not null unique,
    schema          bytea  not null,
    added_columns   bytea,
    key_columns     text   not null,
    partitions      bigint not null,
    retention_rows  bigint,
    retention_age   bigint,
    retention_bytes bigint,
    contract        text,
    payloads        text,
    created_at      bigint not null
);

-- The hashes of the keys that the queue had when partitions were added; those keys stay in their partitions.
create table penstock.key_home (
    queue_id   bigint not null references penstock.queue on delete cascade,
    partitions bigint not null,
    hashes     bytea  not null,
    primary key (queue_id, partitions)
);

-- The row lock of a partition orders its appends. total is the queue's number of partitions, repeated here so that an append that holds
-- the lock sees that the queue has grown. last_timestamp is the timestamp of the newest row. last_clock is the timestamp of the newest append
-- that got it from the clock. Later appends got timestamps just after the previous row, since the clock had not advanced.
-- Half of each page is left free, so that an update finds room next to the old row, and no index has to be changed.
create table penstock.partition (
    queue_id       bigint not null references penstock.queue on delete cascade,
    partition      bigint not null,
    first_index    bigint not null default 0,
    next_index     bigint not null default 0,
    last_timestamp bigint not null default 0,
    last_clock     bigint not null default 0,
    bytes          bigint not null default 0,
    segments       bigint not null default 0,
    total          bigint not null,
    primary key (queue_id, partition),
    -- A role that may append can write these columns, but only values that an append can produce.
    check (0 <= first_index and first_index <= next_index and next_index < 4611686018427387904),
    check (next_index - first_index <= 1099511627776),
    check (-4611686018427387904 < last_timestamp and last_timestamp < 4611686018427387904),
    check (0 <= bytes and bytes < 4611686018427387904 and 0 <= segments and segments < 4611686018427387904)
) with (fillfactor = 50);

-- What the database keeps of a segment's rows: the rows themselves in data, unless they are in an object, and for a compacted segment the
-- runs.
create table penstock.payload (
    payload_id bigint primary key,
    runs       bytea,
    data       bytea,
    check (data is not null or runs is not null),
    check (octet_length(runs) <= 2097152)
);
-- Payloads are already compressed.
alter table penstock.payload alter column data set storage external;

-- Objects with the rows of segments, at their queue's location. An object's name there is made of object_id and suffix, which are random.
-- unused_at is when a cleanup first found that the object has no rows of a segment any more.
create table penstock.object (
    queue_id   bigint not null,
    object_id  bigint not null,
    suffix     bigint not null,
    size       bigint not null,
    created_at bigint not null,
    unused_at  bigint,
    primary key (queue_id, object_id),
    check (object_id >= 0 and suffix >= 0 and size >= 0)
);

-- Where the objects of dropped queues are, until they are deleted.
create table penstock.dropped_payloads (
    queue_id   bigint not null primary key,
    payloads   text   not null,
    dropped_at bigint not null
);

-- Locations of objects: when they were last cleaned up, which database they belong to (a copy is a different one), and when another
-- database was found to own them or to have cleaned them up.
create table penstock.location (
    payloads   text   not null primary key,
    cleaned_at bigint not null,
    instance   text   not null,
    refused_at bigint,
    check (octet_length(payloads) <= 4096 and octet_length(instance) <= 256)
);

-- The tokens of cleanups. A cleanup inserts a token here, and then writes it into an object at the location. A copy of the store lacks
-- the tokens that are written after it was made. Tokens of take-overs are kept, and so are tokens that are not settled: the process that
-- inserted one may still write it, however late.
create table penstock.cleaning (
    payloads text   not null references penstock.location on delete cascade,
    token    text   not null,
    begun_at bigint not null,
    taken_over bigint not null,
    settled_at bigint,
    primary key (payloads, token),
    check (octet_length(token) <= 64)
);

-- columns_id says which of the queue's columns the rows have, and in which types: those up to the field of added_columns with this id,
-- or, if it is 0, those that the queue was created with. The rows are in the payload's data, or in an object of the queue: as many bytes
-- as bytes says from start_byte on, with a CRC-32. A segment in an object has a payload only if it has runs.
create table penstock.segment (
    queue_id        bigint not null,
    partition       bigint not null,
    start_index     bigint not null,
    end_index       bigint not null,
    first_append    bigint not null,
    last_append     bigint not null,
    first_timestamp bigint not null,
    last_timestamp  bigint not null,
    bytes           bigint not null,
    columns_id      bigint not null,
    payload_id      bigint,
    object_id       bigint,
    start_byte      bigint,
    checksum        bigint,
    primary key (queue_id, partition, end_index),
    check (bytes >= 0),
    check (case when object_id is null then payload_id is not null
        else start_byte is not null and checksum is not null and start_byte between 0 and 1099511627776 and bytes between 1 and 1073741824
            and checksum between 0 and 4294967295 end)
);
create index segment_by_object on penstock.segment (object_id) where object_id is not null;

-- Where a partition ended at a time, while the timestamp of its newest row was ahead of the clock: the rows below next_index were appended
-- by observed_at. A record is valid while its last_clock is that of the partition.
create table penstock.observed_end (
    queue_id       bigint not null references penstock.queue on delete cascade,
    partition      bigint not null,
    observed_at    bigint not null,
    next_index     bigint not null,
    last_clock     bigint not null,
    primary key (queue_id, partition, observed_at)
);

-- A row has all segments that an attempt has staged in one transaction, numbered from ordinal on. segment_list has, as columns of
-- little-endian 8-byte integers, each segment's partition, number of rows, bytes, columns_id, payload_id, object_id, start_byte and checksum;
-- -1 stands for null.
create table penstock.staged (
    app_id       text collate "C" not null,
    batch_id     bigint not null,
    attempt      text collate "C" not null,
    task         bigint not null,
    ordinal      bigint not null,
    queue_id     bigint not null,
    segments     bigint not null,
    bytes        bigint not null,
    segment_list bytea  not null,
    created_at   bigint not null,
    primary key (app_id, batch_id, attempt, ordinal),
    check (segments between 1 and 1048576 and octet_length(segment_list) = 64 * segments),
    check (bytes >= 0 and octet_length(app_id) <= 4096 and octet_length(attempt) <= 4096)
);

-- The objects that have staged rows.
create table penstock.staged_object (
    object_id bigint not null primary key,
    app_id    text collate "C" not null,
    batch_id  bigint not null,
    attempt   text collate "C" not null,
    ordinal   bigint not null,
    foreign key (app_id, batch_id, attempt, ordinal) references penstock.staged on delete cascade
);
create index staged_object_by_attempt on penstock.staged_object (app_id, batch_id, attempt, ordinal);

-- The commits of a change feed; ends is a JSON list of each partition's next index after the commit.
create table penstock.feed_commit (
    queue_id  bigint not null references penstock.queue on delete cascade,
    version   bigint not null,
    timestamp bigint not null,
    row_count bigint not null,
    ends      text   not null,
    primary key (queue_id, version),
    check (octet_length(ends) <= 16777216)
);

create table penstock.consumer (
    consumer_id bigint generated always as identity primary key,
    name        text collate "C" not null unique,
    created_at  bigint not null
);

-- plan is the end offset of the micro-batch in flight; it is open while plan_epoch equals epoch, the owner's epoch.
create table penstock.registration (
    consumer_id bigint not null references penstock.consumer on delete cascade,
    queue_id    bigint not null references penstock.queue on delete cascade,
    vital       bigint not null,
    generation  bigint not null,
    epoch       bigint not null default 0,
    owner       text,
    app_id      text,
    plan_epoch  bigint,
    plan        text,
    draining    bigint not null default 0,
    primary key (consumer_id, queue_id),
    check (vital in (0, 1) and draining in (0, 1) and 0 < generation and generation < 4611686018427387904),
    check (0 <= epoch and epoch < 4611686018427387904 and plan_epoch between 0 and epoch),
    check (octet_length(owner) <= 4096 and octet_length(app_id) <= 4096 and octet_length(plan) <= 16777216)
);
create index registration_by_queue on penstock.registration (queue_id);

create table penstock.position (
    consumer_id bigint not null,
    queue_id    bigint not null,
    partition   bigint not null,
    next_index  bigint not null,
    safe_index  bigint not null,
    primary key (consumer_id, queue_id, partition),
    check (0 <= next_index and next_index < 4611686018427387904),
    check (0 <= safe_index and safe_index < 4611686018427387904),
    foreign key (consumer_id, queue_id) references penstock.registration on delete cascade
) with (fillfactor = 50);

create table penstock.producer (
    queue_id bigint not null references penstock.queue on delete cascade,
    session  text collate "C" not null,
    epoch    bigint not null,
    owner    text not null,
    sequence bigint not null,
    primary key (queue_id, session),
    check (1 <= epoch and epoch < 4611686018427387904 and -1 <= sequence and sequence < 4611686018427387904),
    check (octet_length(session) <= 4096 and octet_length(owner) <= 4096)
);

-- Pumps, which append the changes of a server's log to queues. owner is the process that runs the pump. version is the last commit
-- whose rows are all appended. part_version is the next commit, of which part_rows rows are appended.
create table penstock.pump (
    name         text collate "C" not null primary key,
    owner        text   not null,
    epoch        bigint not null,
    alive_at     bigint not null,
    version      bigint not null,
    timestamp    bigint not null,
    part_version bigint not null,
    part_rows    bigint not null,
    state        text   not null,
    check (0 <= epoch and epoch < 4611686018427387904 and 0 <= part_rows and part_rows < 4611686018427387904),
    check (octet_length(name) <= 4096 and octet_length(owner) <= 4096 and octet_length(state) <= 16777216)
);

-- task is -1 for a whole micro-batch. logged is the offset that the query's checkpoint logs for it, if the checkpoint is
-- written after the sink has committed.
create table penstock.ledger (
    sink         text collate "C" not null,
    app_id       text collate "C" not null,
    batch_id     bigint not null,
    task         bigint not null,
    ranges       text   not null,
    row_count    bigint not null,
    logged       text,
    committed_at bigint not null,
    primary key (sink, app_id, batch_id, task),
    check (octet_length(sink) <= 4096 and octet_length(app_id) <= 4096 and octet_length(ranges) <= 16777216 and octet_length(logged) <= 16777216)
);

-- How far consumers of other stores have written into this one.
create table penstock.mark (
    source     text collate "C" not null,
    app_id     text collate "C" not null,
    partition  bigint not null,
    next_index bigint not null,
    primary key (source, partition),
    check (octet_length(source) <= 8192 and octet_length(app_id) <= 4096)
);

-- Consumers of other stores that write here. Commits of an older generation are refused; the row lock orders the commits.
create table penstock.marked_source (
    source     text   not null primary key,
    app_id     text   not null,
    generation bigint not null,
    check (octet_length(source) <= 8192 and octet_length(app_id) <= 4096)
);

-- Streaming queries as they report themselves, for monitoring from another process.
create table penstock.query (
    query_id        text collate "C" primary key,
    run_id          text   not null,
    name            text,
    engine          text   not null,
    state           text   not null,
    source          text,
    sink            text,
    checkpoint      text,
    spark_ui        text,
    started_at      bigint not null,
    reported_at     bigint not null,
    rows_in         bigint not null default 0,
    rows_out        bigint,
    error_condition text,
    error_message   text,
    error_at        bigint
);

-- Rows are counted since the previous report; all other values are those of the newest micro-batch or epoch. Latencies and durations
-- are in milliseconds. warnings is a JSON list of texts.
create table penstock.query_progress (
    query_id    text collate "C" not null references penstock.query on delete cascade,
    reported_at bigint not null,
    run_id      text   not null,
    batch_id    bigint not null,
    rows_in     bigint not null,
    rows_out    bigint,
    p50         double precision,
    p90         double precision,
    p99         double precision,
    max         double precision,
    duration    double precision,
    durations   text   not null,
    watermark   bigint,
    finalized_until bigint,
    state_rows  bigint,
    state_bytes bigint,
    warnings    text,
    primary key (query_id, reported_at)
);
