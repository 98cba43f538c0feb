"""Pumps: processes that copy changes from PostgreSQL's log to queues without Spark."""
