"""Debezium's change events as change rows."""

from penstock.changes.feeds.debezium.feed import DebeziumFeed as DebeziumFeed
from penstock.changes.feeds.debezium.letters import DEAD_LETTERS as DEAD_LETTERS

__all__ = ["DEAD_LETTERS", "DebeziumFeed"]
