"""Change feed of the snapshots of a table in a folder."""
