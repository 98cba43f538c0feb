"""Debezium's change events as change rows."""

from penstock.changes.feeds.dead_letters import DEAD_LETTERS as DEAD_LETTERS
from penstock.changes.feeds.debezium.feed import DebeziumFeed as DebeziumFeed

__all__ = ["DEAD_LETTERS", "DebeziumFeed"]
