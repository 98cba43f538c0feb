"""Pumps, which copy changes from PostgreSQL's log to queues without Spark."""
