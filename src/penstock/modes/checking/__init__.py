"""What a query will do in an output mode, found out before it starts."""
