"""Whether the columns of a system's data can be those of a feed."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from penstock.arguments import did_you_mean, in_quotes
from penstock.changes.feeds.changelog import METADATA_FIELDS
from penstock.errors import InvalidChangelogSchema

METADATA_NAMES = frozenset(field.name for field in METADATA_FIELDS)


def check_reserved(data: pa.Schema, what: str, more: Iterable[str] = ()) -> None:
    """Refuse data columns with names that a feed adds itself, whatever their case.

    Parameters
    ----------
    what
        What has the columns, for the message.
    more
        Names that this feed adds besides those that every feed adds.

    Raises
    ------
    InvalidChangelogSchema
        RESERVED_COLUMN.
    """
    reserved = METADATA_NAMES.union(more)
    taken = next((name for name in data.names if name.lower() in reserved), None)
    if taken is not None:
        raise InvalidChangelogSchema(
            f"{what} has a column {in_quotes(taken)}, which a change feed adds itself: rename it, or leave it out",
            condition="INVALID_CHANGELOG_SCHEMA.RESERVED_COLUMN",
            column=taken,
        )


def check_there(data: pa.Schema, what: str, wanted: Iterable[str | None]) -> None:
    """Refuse names of columns, or of fields in a struct (``a.b``), that the data does not have.

    Raises
    ------
    InvalidChangelogSchema
        MISSING_COLUMN, offering the nearest.
    """
    for name in filter(None, wanted):
        if name not in data.names and name.split(".")[0].strip("`") not in data.names:
            raise InvalidChangelogSchema(
                f"{what} has no column {in_quotes(name)}, which its contract names.{did_you_mean(name, data.names)}",
                condition="INVALID_CHANGELOG_SCHEMA.MISSING_COLUMN",
                column=name,
            )
