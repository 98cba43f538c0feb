"""One durable state, one transaction at a time, on SQLite and PostgreSQL."""
