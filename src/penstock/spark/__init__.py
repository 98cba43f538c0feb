"""The Spark data source, its options, checkpoint files, and sessions."""
