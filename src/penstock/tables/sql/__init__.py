"""SQL tables as sinks: definitions, staging, and statements that insert, upsert and apply rows."""
