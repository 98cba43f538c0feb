"""Snapshots of a table in a folder, as a change feed."""
