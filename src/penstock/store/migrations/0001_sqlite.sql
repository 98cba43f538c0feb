-- The first schema: queues with their segments, consumers, producer sessions, ledger and staging.
create table penstock.store (
    uuid       text    not null,
    version    integer not null,
    created_at integer not null,
    next_block integer not null default 1
) strict;

create table penstock.queue (
    queue_id        integer primary key autoincrement,
    name            text    not null unique,
    generation      integer not null,
    schema          blob    not null,
    key_columns     text    not null,
    partitions      integer not null,
    retention_rows  integer,
    retention_age   integer,
    retention_bytes integer,
    created_at      integer not null
) strict;

-- The hashes of keys that were in the queue when it grew: those keys stay where they are.
create table penstock.key_home (
    queue_id   integer not null references penstock_queue on delete cascade,
    partitions integer not null,
    hashes     blob    not null,
    primary key (queue_id, partitions)
) strict, without rowid;

-- One row for each partition: its row lock orders the appends. total is the number of partitions that the queue has, here
-- too, so that an append sees under its lock that the queue has grown.
create table penstock.partition (
    queue_id       integer not null references penstock_queue on delete cascade,
    partition      integer not null,
    first_index    integer not null default 0,
    next_index     integer not null default 0,
    last_timestamp integer not null default 0,
    bytes          integer not null default 0,
    segments       integer not null default 0,
    total          integer not null,
    primary key (queue_id, partition)
) strict, without rowid;

create table penstock.payload (
    payload_id integer primary key,
    runs       blob,
    data       blob not null
) strict;

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
    payload_id      integer not null,
    primary key (queue_id, partition, end_index)
) strict, without rowid;

create table penstock.staged (
    app_id     text    not null,
    batch_id   integer not null,
    attempt    text    not null,
    task       integer not null,
    ordinal    integer not null,
    queue_id   integer not null,
    partition  integer not null,
    row_count  integer not null,
    bytes      integer not null,
    payload_id integer not null,
    created_at integer not null,
    primary key (app_id, batch_id, attempt, ordinal)
) strict, without rowid;

create table penstock.consumer (
    consumer_id integer primary key autoincrement,
    name        text    not null unique,
    created_at  integer not null
) strict;

-- plan is the end offset of the micro-batch in hand, split its division into tasks; the plan is open while
-- plan_epoch is the owner's epoch.
create table penstock.registration (
    consumer_id integer not null references penstock_consumer on delete cascade,
    queue_id    integer not null references penstock_queue on delete cascade,
    vital       integer not null,
    generation  integer not null,
    epoch       integer not null default 0,
    app_id      text,
    plan_epoch  integer,
    plan        text,
    split       text,
    draining    integer not null default 0,
    primary key (consumer_id, queue_id)
) strict, without rowid;
create index penstock.registration_by_queue on penstock_registration (queue_id);

create table penstock.position (
    consumer_id integer not null,
    queue_id    integer not null,
    partition   integer not null,
    next_index  integer not null,
    safe_index  integer not null,
    primary key (consumer_id, queue_id, partition),
    foreign key (consumer_id, queue_id) references penstock_registration on delete cascade
) strict, without rowid;

create table penstock.producer (
    queue_id integer not null references penstock_queue on delete cascade,
    session  text    not null,
    epoch    integer not null,
    sequence integer not null,
    primary key (queue_id, session)
) strict, without rowid;

-- task is -1 for a whole micro-batch.
create table penstock.ledger (
    sink         text    not null,
    app_id       text    not null,
    batch_id     integer not null,
    task         integer not null,
    ranges       text    not null,
    row_count    integer not null,
    committed_at integer not null,
    primary key (sink, app_id, batch_id, task)
) strict, without rowid;

-- How far a consumer of another store has been written into this one.
create table penstock.mark (
    source     text    not null,
    app_id     text    not null,
    partition  integer not null,
    next_index integer not null,
    primary key (source, partition)
) strict, without rowid;
