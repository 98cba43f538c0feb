"""Passes over change rows: carry-over removal, update detection and net changes."""
