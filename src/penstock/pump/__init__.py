"""Pumps: processes without Spark that bring the changes of a server's log into queues."""
