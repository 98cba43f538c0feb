"""Comparison of a PostgreSQL table with its copy while both are written, and repair of the copy."""
