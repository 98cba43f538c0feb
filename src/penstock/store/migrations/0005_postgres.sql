-- Where a partition ended at a time, for partitions whose newest row is dated ahead of the clock, by last_timestamp: the rows below
-- next_index had been appended by observed_at.
create table penstock.observed_end (
    queue_id       bigint not null references penstock.queue on delete cascade,
    partition      bigint not null,
    observed_at    bigint not null,
    next_index     bigint not null,
    last_timestamp bigint not null,
    primary key (queue_id, partition, observed_at)
);
