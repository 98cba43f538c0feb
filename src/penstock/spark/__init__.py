"""How Spark sees a store: the data source, its options, checkpoint files, sessions."""
