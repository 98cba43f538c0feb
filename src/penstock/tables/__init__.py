"""SQL, Delta and Iceberg tables as sinks of streaming queries."""
