"""Change feeds from real systems."""
