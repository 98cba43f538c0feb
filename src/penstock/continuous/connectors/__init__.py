"""Sources and sinks of continuous queries."""
