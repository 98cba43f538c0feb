"""Queues, consumers and producer sessions for plain Python programs; Spark is not needed and not imported."""
