-- Where a partition ended at a time, for partitions whose newest row is dated ahead of the clock, by last_timestamp: the rows below
-- next_index had been appended by observed_at.
create table penstock.observed_end (
    queue_id       integer not null references penstock_queue on delete cascade,
    partition      integer not null,
    observed_at    integer not null,
    next_index     integer not null,
    last_timestamp integer not null,
    primary key (queue_id, partition, observed_at)
) strict, without rowid;
