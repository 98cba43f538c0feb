"""Writing a queue from Spark: batch and streaming writers, and what their tasks do."""
