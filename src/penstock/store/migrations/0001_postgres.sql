-- The first schema: queues with their segments, consumers, producer sessions, ledger and staging.
-- Names compare byte by byte, as in SQLite, whatever the database's collation is.
create table penstock.store (
    uuid            text   not null,
    version         bigint not null,
    created_at      bigint not null
);

create table penstock.queue (
    queue_id        bigint generated always as identity primary key,
    name            text collate "C"   not null unique,
    generation      bigint not null,
    schema          bytea  not null,
    key_columns     text   not null,
    partitions      bigint not null,
    retention_rows  bigint,
    retention_age   bigint,
    retention_bytes bigint,
    created_at      bigint not null
);

-- The hashes of keys that were in the queue when it grew: those keys stay where they are.
create table penstock.key_home (
    queue_id        bigint not null references penstock.queue on delete cascade,
    partitions      bigint not null,
    hashes          bytea  not null,
    primary key (queue_id, partitions)
);

-- One row for each partition: its row lock orders the appends. total is the number of partitions that the queue has, here
-- too, so that an append sees under its lock that the queue has grown.
create table penstock.partition (
    queue_id        bigint not null references penstock.queue on delete cascade,
    partition       bigint not null,
    first_index     bigint not null default 0,
    next_index      bigint not null default 0,
    last_timestamp  bigint not null default 0,
    bytes           bigint not null default 0,
    segments        bigint not null default 0,
    total           bigint not null,
    primary key (queue_id, partition)
);

create table penstock.payload (
    payload_id      bigint primary key,
    runs            bytea,
    data            bytea  not null
);

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
    payload_id      bigint not null,
    primary key (queue_id, partition, end_index)
);

create table penstock.staged (
    app_id          text collate "C"   not null,
    batch_id        bigint not null,
    attempt         text collate "C"   not null,
    task            bigint not null,
    ordinal         bigint not null,
    queue_id        bigint not null,
    partition       bigint not null,
    row_count       bigint not null,
    bytes           bigint not null,
    payload_id      bigint not null,
    created_at      bigint not null,
    primary key (app_id, batch_id, attempt, ordinal)
);

create table penstock.consumer (
    consumer_id     bigint generated always as identity primary key,
    name            text collate "C"   not null unique,
    created_at      bigint not null
);

-- plan is the end offset of the micro-batch in hand, split its division into tasks; the plan is open while
-- plan_epoch is the owner's epoch.
create table penstock.registration (
    consumer_id     bigint not null references penstock.consumer on delete cascade,
    queue_id        bigint not null references penstock.queue on delete cascade,
    vital           bigint not null,
    generation      bigint not null,
    epoch           bigint not null default 0,
    app_id          text,
    plan_epoch      bigint,
    plan            text,
    split           text,
    draining        bigint not null default 0,
    primary key (consumer_id, queue_id)
);
create index registration_by_queue on penstock.registration (queue_id);

create table penstock.position (
    consumer_id     bigint not null,
    queue_id        bigint not null,
    partition       bigint not null,
    next_index      bigint not null,
    safe_index      bigint not null,
    primary key (consumer_id, queue_id, partition),
    foreign key (consumer_id, queue_id) references penstock.registration on delete cascade
);

create table penstock.producer (
    queue_id        bigint not null references penstock.queue on delete cascade,
    session         text collate "C"   not null,
    epoch           bigint not null,
    sequence        bigint not null,
    primary key (queue_id, session)
);

-- task is -1 for a whole micro-batch.
create table penstock.ledger (
    sink            text collate "C"   not null,
    app_id          text collate "C"   not null,
    batch_id        bigint not null,
    task            bigint not null,
    ranges          text   not null,
    row_count       bigint not null,
    committed_at    bigint not null,
    primary key (sink, app_id, batch_id, task)
);

-- How far a consumer of another store has been written into this one.
create table penstock.mark (
    source          text collate "C"   not null,
    app_id          text collate "C"   not null,
    partition       bigint not null,
    next_index      bigint not null,
    primary key (source, partition)
);

-- A value stands for a block of 4096 payload ids.
create sequence penstock.payload_block;

-- Payloads are compressed already.
alter table penstock.payload alter column data set storage external;
