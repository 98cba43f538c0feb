"""SQL tables as sinks: the table, staging, and how rows are inserted, upserted and applied."""
