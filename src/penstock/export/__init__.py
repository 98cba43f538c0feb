"""Export of queues to Delta and Iceberg tables."""
