-- The offset that a query's checkpoint logs for a micro-batch, where the checkpoint is written after the sink has committed.
alter table penstock.ledger add column logged text;

-- Consumers of other stores that write here: commits of an older generation than this one are refused. The row's lock orders the commits.
create table penstock.marked_source (
    source     text not null primary key,
    app_id     text not null,
    generation bigint not null
);

-- How a micro-batch is divided into tasks follows from its offset.
alter table penstock.registration drop column split;
