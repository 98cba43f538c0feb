"""Continuous queries: rows go through Spark one by one rather than in micro-batches, at millisecond latency."""
