"""The log of a partition: append, read, compact and trim segments."""
