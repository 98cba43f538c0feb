"""Change rows for Delta and Iceberg tables: their events, and the plan of a merge."""
