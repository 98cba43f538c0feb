"""SQL and Delta tables as sinks of streaming queries."""
