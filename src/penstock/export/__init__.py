"""Tables of a lake that have the rows of a queue."""
