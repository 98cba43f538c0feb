"""Change feeds of Delta tables."""

from penstock.changes.feeds.delta.feed import DeltaFeed

__all__ = ["DeltaFeed"]
