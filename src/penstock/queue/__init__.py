"""Queues, consumers and producer sessions for plain Python programs. This package does not import Spark."""
