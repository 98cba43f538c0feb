"""Rules of the output mode check, one family in each file."""
