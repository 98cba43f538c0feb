"""The commands, one group in each file."""
