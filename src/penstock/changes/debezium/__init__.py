"""Conversion of Debezium change events to change rows."""

from penstock.changes.debezium.dead_letters import DEAD_LETTERS as DEAD_LETTERS
from penstock.changes.debezium.feed import DebeziumFeed as DebeziumFeed

__all__ = ["DEAD_LETTERS", "DebeziumFeed"]
