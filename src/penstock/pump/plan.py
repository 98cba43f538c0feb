"""``PumpPlan``: the plan of a pump, as it is stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.feeds.postgres.catalog import Tables
from penstock.feeds.postgres.publication import PublicationState
from penstock.json_text import Json, unreadable_record
from penstock.pump.backfill_records import TableBackfill, backfills_of
from penstock.pump.recovery_records import TableRecovery, recoveries_of


@dataclass(frozen=True)
class PumpPlan:
    """What a pump reads and writes: the feed, the table definitions, and the queues."""

    feed: str
    """The identity of the feed."""
    together: str | None
    """The queue for all tables; None if each has its own."""
    prefix: str
    """The prefix of the queues' names."""
    queues: dict[str, str]
    """The queue of each table."""
    tables: Tables
    publication: PublicationState
    backfills: dict[str, TableBackfill]
    """The tables that are being backfilled."""
    offset: int = 0
    """The version of a commit minus its position in the log: see :class:`Appender`."""
    recoveries: dict[str, TableRecovery] = field(default_factory=dict)
    """The tables whose recovery is not complete."""

    def to_json(self) -> Json:
        return {
            "feed": self.feed,
            "together": self.together,
            "prefix": self.prefix,
            "queues": self.queues,
            "tables": self.tables.to_json(),
            "publication": self.publication.to_json(),
            "backfills": {name: backfill.to_json() for name, backfill in self.backfills.items()},
            "offset": self.offset,
            "recoveries": {name: recovery.to_json() for name, recovery in self.recoveries.items()},
        }

    @classmethod
    def from_json(cls, name: str, state: Json) -> PumpPlan:
        """Parse and check a stored plan, which other programs may have changed."""
        try:
            queues = {str(table): str(queue) for table, queue in state["queues"].items()}
            tables = Tables.from_json(state["tables"])
            publication = PublicationState.from_json(state["publication"])
            backfills, recoveries = backfills_of(name, state), recoveries_of(name, state)
            offset = state.get("offset", 0)
            if type(offset) is not int or offset < 0 or recoveries.keys() - tables.by_name.keys():
                raise ValueError(state)
            for table, backfill in backfills.items():
                if not backfill.has_key_width(len(tables.by_name[table].key)):
                    raise ValueError(backfill)
            return cls(
                state["feed"],
                state["together"],
                state["prefix"],
                queues,
                tables,
                publication,
                backfills,
                offset,
                recoveries,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise unreadable_record(f"the state of pump {name!r}", error) from None

    def queue_list(self) -> str:
        """Return the quoted names of the queues, for messages."""
        return ", ".join(sorted(map(repr, self.queues.values())))
