"""The demo: a year of flights as a change feed, streamed exactly once."""
