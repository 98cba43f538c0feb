"""Comparison of a PostgreSQL table with its copy, while rows are written, and repair of the copy."""
