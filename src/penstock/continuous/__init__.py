"""Continuous queries: rows pass through Spark one by one, with latencies of milliseconds."""
