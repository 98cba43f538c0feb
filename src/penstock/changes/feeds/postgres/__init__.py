"""Changes of PostgreSQL tables, by logical decoding."""

from penstock.changes.feeds.postgres.feed import PostgresFeed as PostgresFeed
from penstock.changes.feeds.postgres.slot import SlotLag as SlotLag

__all__ = ["PostgresFeed", "SlotLag"]
