"""Reading a queue from Spark: the data source, batch and streaming readers, and their tasks."""
