"""The passes over change rows: carry-over removal, update detection, net changes."""
