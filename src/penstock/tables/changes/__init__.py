"""Change rows for tables of a lake, of any format: the events in them, and what they change."""
