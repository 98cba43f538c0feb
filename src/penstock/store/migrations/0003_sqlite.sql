-- What streaming queries tell of themselves, for whoever looks from another process.
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
    told_at         integer not null,
    rows_in         integer not null default 0,
    rows_out        integer,
    error_condition text,
    error_message   text,
    error_at        integer
) strict, without rowid;

-- Rows are those since the progress before; the rest is that of the newest micro-batch or epoch. Times are in milliseconds, but for
-- told_at and watermark.
create table penstock.query_progress (
    query_id    text    not null references penstock_query on delete cascade,
    told_at     integer not null,
    run_id      text    not null,
    batch_id    integer not null,
    rows_in     integer not null,
    rows_out    integer,
    p50         real,
    p90         real,
    p99         real,
    most        real,
    duration    real,
    durations   text    not null,
    watermark   integer,
    state_rows  integer,
    state_bytes integer,
    primary key (query_id, told_at)
) strict, without rowid;
