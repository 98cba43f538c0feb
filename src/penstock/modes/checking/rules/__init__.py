"""What can be wrong with a query in an output mode, a family of rules in each file."""
