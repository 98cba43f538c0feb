"""The store's tables and transactions, in SQLite and PostgreSQL."""
