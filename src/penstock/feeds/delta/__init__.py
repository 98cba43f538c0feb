"""Change feed of a Delta table."""

from penstock.feeds.delta.feed import DeltaFeed

__all__ = ["DeltaFeed"]
