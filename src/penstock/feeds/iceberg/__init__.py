"""Change feed of an Apache Iceberg table."""

from penstock.feeds.iceberg.feed import IcebergFeed as IcebergFeed

__all__ = ["IcebergFeed"]
