"""Changes of PostgreSQL tables through logical decoding."""

from penstock.feeds.postgres.feed import PostgresFeed as PostgresFeed
from penstock.feeds.postgres.slot import SlotLag as SlotLag

__all__ = ["PostgresFeed", "SlotLag"]
