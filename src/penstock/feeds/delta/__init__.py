"""Change feeds of Delta tables."""

from penstock.feeds.delta.feed import DeltaFeed

__all__ = ["DeltaFeed"]
