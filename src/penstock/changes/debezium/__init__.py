"""Conversion of Debezium change events to change rows."""

from penstock.changes.debezium.feed import DebeziumFeed as DebeziumFeed

__all__ = ["DebeziumFeed"]
