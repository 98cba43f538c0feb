-- What somebody should look at, as a query's sources told of it with that progress: JSON, a list of texts.
alter table penstock.query_progress add column warnings text;
