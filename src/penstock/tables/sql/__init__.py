"""SQL tables as sinks: DDL, staging, and the statements that insert, upsert and apply rows."""
