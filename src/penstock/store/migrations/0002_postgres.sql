-- Change feeds: queues that are written in whole commits.
alter table penstock.queue add column contract text;

-- Where each partition ends behind a commit, as a JSON list.
create table penstock.feed_commit (
    queue_id  bigint not null references penstock.queue on delete cascade,
    version   bigint not null,
    timestamp bigint not null,
    row_count bigint not null,
    ends      text   not null,
    primary key (queue_id, version)
);
