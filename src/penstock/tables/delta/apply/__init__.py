"""Change rows applied to a Delta table."""
