-- The columns that were added to a queue, behind those that it was made with. They are not in the queue's own row, which programs
-- that an older Penstock runs read as a whole.
create table penstock.added_columns (
    queue_id integer not null primary key references penstock_queue on delete cascade,
    columns  blob not null
) strict, without rowid;

-- How many of the queue's columns the rows have; null stands for those that the queue was made with, as in everything that was written
-- before.
alter table penstock.payload add column width integer;

-- A program that an older Penstock runs goes on with the columns that it knows. Only merging it leaves to others: it would drop the
-- columns that it does not know.
create trigger penstock.merged_says_width before insert on penstock_payload
when new.runs is not null and new.width is null
begin
    select raise(abort, 'this program runs an older Penstock than the one that migrated the store, and merges no more: upgrade it');
end;
