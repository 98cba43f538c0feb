"""The changes of an Apache Iceberg table, by snapshot."""

from penstock.feeds.iceberg.feed import IcebergFeed as IcebergFeed

__all__ = ["IcebergFeed"]
