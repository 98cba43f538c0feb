"""What a query was planned with, and whether a later version of the table still has those columns.

A query keeps the columns that its table had when it was planned. It travels with the schema of the read, as metadata of the schema
as a whole: Spark does not carry that, so the data source has it as an option.
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
    """What the table format knows the column by, where that is not its name."""

    @property
    def key(self) -> object:
        return self.name.lower() if self.id is None else self.id


@dataclass(frozen=True, slots=True)
class Planned:
    """A table as a query knows it."""

    version: int
    """The newest version at that time."""
    columns: int
    """How many columns the table has; a read of fewer was asked for these alone."""
    only_changes: bool = False
    """Whether no pass looks for rows that did not change."""

    @classmethod
    def of(cls, schema: pa.Schema) -> Planned | None:
        """What a read's schema says; None where nobody said it."""
        found = (schema.metadata or {}).get(PLAN)
        return None if found is None else cls(**json.loads(found))

    def to_json(self) -> str:
        """The plan of a feed's description."""
        return json.dumps(asdict(self))

    def check(self, name: str, version: int, read: Iterable[Column], now: Iterable[Column]) -> None:
        """Refuse a version that came after the query was planned, and has other columns.

        Parameters
        ----------
        name
            The table.
        read
            The columns that are read.
        now
            All columns of the version.

        Raises
        ------
        FeedUnavailable
            SCHEMA_CHANGED.
        """
        if version <= self.version:
            return
        wanted = {column.key: column for column in read}
        there = {column.key: column for column in now}
        gone = [column.name for key, column in wanted.items() if key not in there]
        added = [column.name for key, column in there.items() if key not in wanted]
        other = [
            f"{in_quotes(column.name)} is {there[key].type} now, not {column.type}"
            for key, column in wanted.items()
            if key in there and there[key].type != column.type
        ]
        changes = [f"{in_quotes(each)} was dropped" for each in gone] + other
        if len(wanted) >= self.columns:
            changes += [f"{in_quotes(each)} was added" for each in added]
        if changes:
            raise FeedUnavailable(
                f"the columns of {name} have changed in version {version}, after this query was planned: {', '.join(changes[:5])}. "
                "Read the feed again and start the query again: it resumes before that version, with the new columns",
                condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
                version=version,
                added=added,
                dropped=gone,
            )


@lru_cache(maxsize=64)
def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    """The data columns of a read, or of a table."""
    return tuple(Column(field.name, str(field.type)) for field in schema if field.name not in METADATA_NAMES)
