-- Change feeds: queues that are written in whole commits.
alter table penstock.queue add column contract text;

-- Where each partition ends behind a commit, as a JSON list.
create table penstock.feed_commit (
    queue_id  integer not null references penstock_queue on delete cascade,
    version   integer not null,
    timestamp integer not null,
    row_count integer not null,
    ends      text    not null,
    primary key (queue_id, version)
) strict, without rowid;
