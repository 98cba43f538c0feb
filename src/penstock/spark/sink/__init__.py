"""Writing into a queue from Spark: batch and streaming writers, and their tasks."""
