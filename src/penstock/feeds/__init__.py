"""Change feeds: connectors to queues, PostgreSQL, Delta, Iceberg and snapshots."""
