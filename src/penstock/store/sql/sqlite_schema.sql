-- The SQLite store.
-- next_block counts blocks of 4096 payload ids. last_generation is the newest generation of any registration. payloads is where new
-- queues keep their large payloads, if not in the database.
create table penstock.store (
    uuid            text    not null primary key,
    version         integer not null,
    created_at      integer not null,
    last_generation integer not null default 0,
    payloads        text,
    next_block      integer not null default 1
) strict;

-- queue_id is random, so that a queue that was dropped and recreated, or was created after its store was restored from a backup, is a
-- different one. added_columns are columns that were added later, and wider types of earlier columns, each with a random id.
-- contract is the contract of a change feed, as JSON. payloads is where the queue's large payloads are, if not in the database.
create table penstock.queue (
    queue_id        integer not null primary key,
    name            text    not null unique,
    schema          blob    not null,
    added_columns   blob,
    key_columns     text    not null,
    partitions      integer not null,
    retention_rows  integer,
    retention_age   integer,
    retention_bytes integer,
    contract        text,
    payloads        text,
    created_at      integer not null
) strict;

-- The hashes of the keys that the queue had when partitions were added; those keys stay in their partitions.
create table penstock.key_home (
    queue_id   integer not null references penstock_queue on delete cascade,
    partitions integer not null,
    hashes     blob    not null,
    primary key (queue_id, partitions)
) strict, without rowid;

-- The row lock of a partition orders its appends. total is the queue's number of partitions, repeated here so that an append that holds
-- the lock sees that the queue has grown. last_timestamp is the timestamp of the newest row. last_clock is the timestamp of the newest append
-- that got it from the clock. Later appends got timestamps just after the previous row, since the clock had not advanced.
create table penstock.partition (
    queue_id       integer not null references penstock_queue on delete cascade,
    partition      integer not null,
    first_index    integer not null default 0,
    next_index     integer not null default 0,
    last_timestamp integer not null default 0,
    last_clock     integer not null default 0,
    bytes          integer not null default 0,
    segments       integer not null default 0,
    total          integer not null,
    primary key (queue_id, partition),
    -- A role that may append can write these columns, but only values that an append can produce.
    check (0 <= first_index and first_index <= next_index and next_index < 4611686018427387904),
    check (next_index - first_index <= 1099511627776),
    check (-4611686018427387904 < last_timestamp and last_timestamp < 4611686018427387904),
    check (0 <= bytes and bytes < 4611686018427387904 and 0 <= segments and segments < 4611686018427387904)
) strict, without rowid;

-- What the database keeps of a segment's rows: the rows themselves in data, unless they are in an object, and for a compacted segment the
-- runs.
create table penstock.payload (
    payload_id integer primary key,
    runs       blob,
    data       blob,
    check (data is not null or runs is not null),
    check (length(runs) <= 2097152)
) strict;

-- Objects with the rows of segments, at their queue's location. An object's name there is made of object_id and suffix, which are random.
-- unused_at is when a cleanup first found that the object has no rows of a segment any more.
create table penstock.object (
    queue_id   integer not null,
    object_id  integer not null,
    suffix     integer not null,
    size       integer not null,
    created_at integer not null,
    unused_at  integer,
    primary key (queue_id, object_id),
    check (object_id >= 0 and suffix >= 0 and size >= 0)
) strict, without rowid;

-- Where the objects of dropped queues are, until they are deleted.
create table penstock.dropped_payloads (
    queue_id   integer not null primary key,
    payloads   text    not null,
    dropped_at integer not null
) strict;

-- Locations of objects: when they were last cleaned up, which database they belong to (a copy is a different one), and when another
-- database was found to own them or to have cleaned them up.
create table penstock.location (
    payloads   text    not null primary key,
    cleaned_at integer not null,
    instance   text    not null,
    refused_at integer,
    check (length(cast(payloads as blob)) <= 4096 and length(cast(instance as blob)) <= 256)
) strict;

-- The tokens of cleanups. A cleanup inserts a token here, and then writes it into an object at the location. A copy of the store lacks
-- the tokens that are written after it was made. Tokens of take-overs are kept, and so are tokens that are not settled: the process that
-- inserted one may still write it, however late.
create table penstock.cleaning (
    payloads text    not null references penstock_location on delete cascade,
    token    text    not null,
    begun_at integer not null,
    taken_over integer not null,
    settled_at integer,
    primary key (payloads, token),
    check (length(cast(token as blob)) <= 64)
) strict;

-- columns_id says which of the queue's columns the rows have, and in which types: those up to the field of added_columns with this id,
-- or, if it is 0, those that the queue was created with. The rows are in the payload's data, or in an object of the queue: as many bytes
-- as bytes says from start_byte on, with a CRC-32. A segment in an object has a payload only if it has runs.
create table penstock.segment (
    queue_id        integer not null,
    partition       integer not null,
    start_index     integer not null,
    end_index       integer not null,
    first_append    integer not null,
    last_append     integer not null,
    first_timestamp integer not null,
    last_timestamp  integer not null,
    bytes           integer not null,
    columns_id      integer not null,
    payload_id      integer,
    object_id       integer,
    start_byte      integer,
    checksum        integer,
    primary key (queue_id, partition, end_index),
    check (bytes >= 0),
    check (case when object_id is null then payload_id is not null
        else start_byte is not null and checksum is not null and start_byte between 0 and 1099511627776 and bytes between 1 and 1073741824
            and checksum between 0 and 4294967295 end)
) strict, without rowid;
create index penstock.segment_by_object on penstock_segment (object_id) where object_id is not null;

-- Where a partition ended at a time, while the timestamp of its newest row was ahead of the clock: the rows below next_index were appended
-- by observed_at. A record is valid while its last_clock is that of the partition.
create table penstock.observed_end (
    queue_id       integer not null references penstock_queue on delete cascade,
    partition      integer not null,
    observed_at    integer not null,
    next_index     integer not null,
    last_clock     integer not null,
    primary key (queue_id, partition, observed_at)
) strict, without rowid;

-- A row has all segments that an attempt has staged in one transaction, numbered from ordinal on. segment_list has, as columns of
-- little-endian 8-byte integers, each segment's partition, number of rows, bytes, columns_id, payload_id, object_id, start_byte and checksum;
-- -1 stands for null.
create table penstock.staged (
    app_id       text    not null,
    batch_id     integer not null,
    attempt      text    not null,
    task         integer not null,
    ordinal      integer not null,
    queue_id     integer not null,
    segments     integer not null,
    bytes        integer not null,
    segment_list blob    not null,
    created_at   integer not null,
    primary key (app_id, batch_id, attempt, ordinal),
    check (segments between 1 and 1048576 and length(segment_list) = 64 * segments),
    check (bytes >= 0 and length(cast(app_id as blob)) <= 4096 and length(cast(attempt as blob)) <= 4096)
) strict, without rowid;

-- The objects that have staged rows.
create table penstock.staged_object (
    object_id integer not null primary key,
    app_id    text    not null,
    batch_id  integer not null,
    attempt   text    not null,
    ordinal   integer not null,
    foreign key (app_id, batch_id, attempt, ordinal) references penstock_staged on delete cascade
) strict;
create index penstock.staged_object_by_attempt on penstock_staged_object (app_id, batch_id, attempt, ordinal);

-- The commits of a change feed; ends is a JSON list of each partition's next index after the commit.
create table penstock.feed_commit (
    queue_id  integer not null references penstock_queue on delete cascade,
    version   integer not null,
    timestamp integer not null,
    row_count integer not null,
    ends      text    not null,
    primary key (queue_id, version),
    check (length(cast(ends as blob)) <= 16777216)
) strict, without rowid;

create table penstock.consumer (
    consumer_id integer primary key autoincrement,
    name        text    not null unique,
    created_at  integer not null
) strict;

-- plan is the end offset of the micro-batch in flight; it is open while plan_epoch equals epoch, the owner's epoch.
create table penstock.registration (
    consumer_id integer not null references penstock_consumer on delete cascade,
    queue_id    integer not null references penstock_queue on delete cascade,
    vital       integer not null,
    generation  integer not null,
    epoch       integer not null default 0,
    owner       text,
    app_id      text,
    plan_epoch  integer,
    plan        text,
    draining    integer not null default 0,
    primary key (consumer_id, queue_id),
    check (vital in (0, 1) and draining in (0, 1) and 0 < generation and generation < 4611686018427387904),
    check (0 <= epoch and epoch < 4611686018427387904 and plan_epoch between 0 and epoch),
    check (length(cast(owner as blob)) <= 4096 and length(cast(app_id as blob)) <= 4096 and length(cast(plan as blob)) <= 16777216)
) strict, without rowid;
create index penstock.registration_by_queue on penstock_registration (queue_id);

create table penstock.position (
    consumer_id integer not null,
    queue_id    integer not null,
    partition   integer not null,
    next_index  integer not null,
    safe_index  integer not null,
    primary key (consumer_id, queue_id, partition),
    check (0 <= next_index and next_index < 4611686018427387904),
    check (0 <= safe_index and safe_index < 4611686018427387904),
    foreign key (consumer_id, queue_id) references penstock_registration on delete cascade
) strict, without rowid;

create table penstock.producer (
    queue_id integer not null references penstock_queue on delete cascade,
    session  text    not null,
    epoch    integer not null,
    owner    text    not null,
    sequence integer not null,
    primary key (queue_id, session),
    check (1 <= epoch and epoch < 4611686018427387904 and -1 <= sequence and sequence < 4611686018427387904),
    check (length(cast(session as blob)) <= 4096 and length(cast(owner as blob)) <= 4096)
) strict, without rowid;

-- Pumps, which append the changes of a server's log to queues. owner is the process that runs the pump. version is the last commit
-- whose rows are all appended. part_version is the next commit, of which part_rows rows are appended.
create table penstock.pump (
    name         text    not null primary key,
    owner        text    not null,
    epoch        integer not null,
    alive_at     integer not null,
    version      integer not null,
    timestamp    integer not null,
    part_version integer not null,
    part_rows    integer not null,
    state        text    not null,
    check (0 <= epoch and epoch < 4611686018427387904 and 0 <= part_rows and part_rows < 4611686018427387904),
    check (length(cast(name as blob)) <= 4096 and length(cast(owner as blob)) <= 4096 and length(cast(state as blob)) <= 16777216)
) strict, without rowid;

-- task is -1 for a whole micro-batch. logged is the offset that the query's checkpoint logs for it, if the checkpoint is
-- written after the sink has committed.
create table penstock.ledger (
    sink         text    not null,
    app_id       text    not null,
    batch_id     integer not null,
    task         integer not null,
    ranges       text    not null,
    row_count    integer not null,
    logged       text,
    committed_at integer not null,
    primary key (sink, app_id, batch_id, task),
    check (length(cast(sink as blob)) <= 4096 and length(cast(app_id as blob)) <= 4096 and length(cast(ranges as blob)) <= 16777216 and length(cast(logged as blob)) <= 16777216)
) strict, without rowid;

-- How far consumers of other stores have written into this one.
create table penstock.mark (
    source     text    not null,
    app_id     text    not null,
    partition  integer not null,
    next_index integer not null,
    primary key (source, partition),
    check (length(cast(source as blob)) <= 8192 and length(cast(app_id as blob)) <= 4096)
) strict, without rowid;

-- Consumers of other stores that write here. Commits of an older generation are refused; the row lock orders the commits.
create table penstock.marked_source (
    source     text    not null primary key,
    app_id     text    not null,
    generation integer not null,
    check (length(cast(source as blob)) <= 8192 and length(cast(app_id as blob)) <= 4096)
) strict, without rowid;

-- Streaming queries as they report themselves, for monitoring from another process.
create table penstock.query (
    query_id        text    not null primary key,
    run_id          text    not null,
    name            text,
    engine          text    not null,
    state           text    not null,
    source          text,
    sink            text,
    checkpoint      text,
    spark_ui        text,
    started_at      integer not null,
    reported_at     integer not null,
    rows_in         integer not null default 0,
    rows_out        integer,
    error_condition text,
    error_message   text,
    error_at        integer
) strict, without rowid;

-- Rows are counted since the previous report; all other values are those of the newest micro-batch or epoch. Latencies and durations
-- are in milliseconds. warnings is a JSON list of texts.
create table penstock.query_progress (
    query_id    text    not null references penstock_query on delete cascade,
    reported_at integer not null,
    run_id      text    not null,
    batch_id    integer not null,
    rows_in     integer not null,
    rows_out    integer,
    p50         real,
    p90         real,
    p99         real,
    max         real,
    duration    real,
    durations   text    not null,
    watermark   integer,
    finalized_until integer,
    state_rows  integer,
    state_bytes integer,
    warnings    text,
    primary key (query_id, reported_at)
) strict, without rowid;
