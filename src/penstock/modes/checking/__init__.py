"""Check of output modes before a query starts."""
