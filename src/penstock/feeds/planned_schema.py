"""The plan of a query: the columns of its table, and the check that later versions still have them.

A query keeps the columns that its table had when it was planned. The plan is metadata of the read's schema;
Spark does not carry that, so the data source has it as an option.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache

import pyarrow as pa

from penstock.arguments import in_quotes
from penstock.errors import FeedUnavailable
from penstock.feeds.protocol import METADATA_NAMES, PLAN


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a version of a table."""

    name: str
    type: str
    id: int | None = None
    """The column's id, if the table format identifies columns by id rather than by name."""

    @property
    def key(self) -> object:
        return self.name.lower() if self.id is None else self.id


@dataclass(frozen=True, slots=True)
class Planned:
    """A table as a query was planned with it."""

    version: int
    """The newest version at that time."""
    columns: int
    """How many columns the table had; a read of fewer columns ignores added ones."""
    only_changes: bool = False
    """Whether no pass removes unchanged rows."""

    @classmethod
    def of(cls, schema: pa.Schema) -> Planned | None:
        """Return the plan in a read's schema; None if it has none."""
        plan = (schema.metadata or {}).get(PLAN)
        return None if plan is None else cls(**json.loads(plan))

    def to_json(self) -> str:
        """Return the plan as JSON, for a feed's description."""
        return json.dumps(asdict(self))

    def check(self, name: str, version: int, read: Iterable[Column], now: Iterable[Column]) -> None:
        """Refuse a version with other columns that was committed after the query was planned.

        Parameters
        ----------
        name
            The table.
        read
            The columns to read.
        now
            All columns of the version.
        """
        if version <= self.version:
            return
        wanted = {column.key: column for column in read}
        current = {column.key: column for column in now}
        dropped = [column.name for key, column in wanted.items() if key not in current]
        added = [column.name for key, column in current.items() if key not in wanted]
        retyped = [
            f"{in_quotes(column.name)} is {current[key].type} now, not {column.type}"
            for key, column in wanted.items()
            if key in current and current[key].type != column.type
        ]
        changes = [f"{in_quotes(name)} was dropped" for name in dropped] + retyped
        if len(wanted) >= self.columns:
            changes += [f"{in_quotes(name)} was added" for name in added]
        if changes:
            raise FeedUnavailable(
                f"the columns of {name} have changed in version {version}, after this query was planned: "
                f"{', '.join(changes[:5])}. Read the feed again and start the query again: it resumes before "
                "that version, with the new columns",
                condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
                version=version,
                added=added,
                dropped=dropped,
            )


@lru_cache(maxsize=64)
def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    """Return the data columns of a read, or of a table."""
    return tuple(Column(field.name, str(field.type)) for field in schema if field.name not in METADATA_NAMES)
