"""Change events for Delta and Iceberg tables, and the plan that merges them."""
