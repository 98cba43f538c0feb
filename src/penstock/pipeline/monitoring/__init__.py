"""Reports of queries to a store, for the monitor page in another process."""
