"""The SQLite store: one file in WAL mode, for one machine."""
