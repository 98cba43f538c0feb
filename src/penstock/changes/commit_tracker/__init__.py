"""Tracking of the commits that a query has read, to find violations of a feed's contract."""
