-- The columns that were added to a queue, behind those that it was made with. They are not in the queue's own row, which programs
-- that an older Penstock runs read as a whole.
create table penstock.added_columns (
    queue_id bigint not null primary key references penstock.queue on delete cascade,
    columns  bytea not null
);

-- How many of the queue's columns the rows have; null stands for those that the queue was made with, as in everything that was written
-- before.
alter table penstock.payload add column width bigint;

-- A program that an older Penstock runs goes on with the columns that it knows. Only merging it leaves to others: it would drop the
-- columns that it does not know.
alter table penstock.payload add constraint merged_says_width check (runs is null or width is not null) not valid;
