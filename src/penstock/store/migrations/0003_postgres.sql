-- What streaming queries tell of themselves, for whoever looks from another process.
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
    told_at         bigint not null,
    rows_in         bigint not null default 0,
    rows_out        bigint,
    error_condition text,
    error_message   text,
    error_at        bigint
);

-- Rows are those since the progress before; the rest is that of the newest micro-batch or epoch. Times are in milliseconds, but for
-- told_at and watermark.
create table penstock.query_progress (
    query_id    text collate "C" not null references penstock.query on delete cascade,
    told_at     bigint not null,
    run_id      text   not null,
    batch_id    bigint not null,
    rows_in     bigint not null,
    rows_out    bigint,
    p50         double precision,
    p90         double precision,
    p99         double precision,
    most        double precision,
    duration    double precision,
    durations   text   not null,
    watermark   bigint,
    state_rows  bigint,
    state_bytes bigint,
    primary key (query_id, told_at)
);
