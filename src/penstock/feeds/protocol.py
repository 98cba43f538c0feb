"""What a system has to offer, so that Spark can read its changes: the contract between a connector and the data source.

A connector is a frozen dataclass of what its user said. It is made anew in every process that needs it, from its URL form, so
it opens nothing before it is asked to, and what it opens belongs to that process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import DataLost, FeedUnavailable, InvalidChangelogSchema
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION, ChangeContract

INSTANT = pa.timestamp("us", tz="UTC")
METADATA_FIELDS = (
    pa.field(CHANGE_TYPE, pa.string(), nullable=False),
    pa.field(COMMIT_VERSION, pa.int64(), nullable=False),
    pa.field(COMMIT_TIMESTAMP, INSTANT, nullable=False),
)


@dataclass(frozen=True)
class Commit:
    """One commit of a feed."""

    version: int
    timestamp: int
    """Microseconds since 1970, UTC."""
    rows: int
    """Its change rows; an estimate where counting them means reading them."""


PLAN = b"penstock.plan"
"""The metadata of a read's schema as a whole that has the plan of a description."""


def with_plan(schema: pa.Schema, plan: str | None) -> pa.Schema:
    """A read's schema with the plan of a description, where that has one."""
    return schema if plan is None else schema.with_metadata({PLAN: plan.encode()})


@dataclass(frozen=True)
class Description:
    """What a feed looks like now."""

    identity: str
    """Which feed this is wherever it is reached from, without a secret: a checkpoint of another one is refused."""
    schema: pa.Schema
    """Data columns, then METADATA_FIELDS."""
    contract: ChangeContract | None
    """None where nothing tells rows apart; no pass can be done then."""
    plan: str | None = None
    """What a feed whose columns change has to be told again, to read as it was described: with the schema of a read (`planned.py`), or by
    :class:`PlannedChangelog`."""

    @property
    def planned_schema(self) -> pa.Schema:
        """The schema of a read of all columns that was planned with this description."""
        return with_plan(self.schema, self.plan)


@runtime_checkable
class Changelog(Protocol):
    """A feed of changes.

    Versions are whole numbers that ascend with the commits, not always by one. A range ``(after, upto]`` means the commits with
    a version above ``after`` and not above ``upto``; neither end has to be a commit's version. What a range holds never
    changes, however often it is read: a micro-batch that is repeated has the same rows.
    """

    @property
    def url(self) -> str:
        """The feed's URL form, from which ``feeds.parse`` makes an equal one; it may hold a password."""

    @property
    def name(self) -> str:
        """The feed for messages, without a password."""

    def describe(self) -> Description:
        """What the feed looks like now; called in the driver, once for each query.

        Raises
        ------
        FeedUnavailable
            When the system says no, with what to do about it.
        """

    def begin(self) -> int:
        """The version after which a streaming query reads that is new and was not told where to start; called in the driver.

        Where the system has to keep something for such a query, this makes it. It may be called again, until the query has logged
        something.

        Raises
        ------
        FeedUnavailable
            When a new query would miss rows that the feed was asked for.
        """

    def oldest(self) -> int:
        """The version after which everything can still be read; makes nothing."""

    def newest(self, after: int) -> int:
        """The version up to which there are changes now; ``after`` where there are none above it. Called before each
        micro-batch: it has to be cheap."""

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        """The commits of a range in their order, read as they are asked for.

        Parameters
        ----------
        rows
            The caller will not go on once the commits have that many rows together.

        Raises
        ------
        DataLost
            When a part of the range is gone, naming the versions that are left.
        """

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Any]:
        """A range, divided into pieces of about that many rows that can be pickled and read side by side; in the driver.

        Raises
        ------
        DataLost
            As :meth:`commits`.
        """

    def read(self, task: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The change rows of a task, on an executor: batches of exactly that schema, never a whole large commit at once.

        Parameters
        ----------
        schema
            Some or all of the described columns, in any order.
        """

    def logged(self, upto: int) -> None:
        """Spark has logged everything up to a version for good: the system may let go of it. Called now and then, in the
        driver; it may be called again, and after a crash for an older version."""


@runtime_checkable
class NamesCommits(Protocol):
    """A feed that knows a commit from another one of the same version, such as of a table that was restored from a backup."""

    def commit_name(self, version: int) -> str | None:
        """What the commit of a version is known by; None where there is none, or it cannot be read any more."""


def history_changed(name: str, version: int) -> DataLost:
    """The error for a version that is another commit than the one which was read."""
    return DataLost(
        f"version {version} of {name} is another commit than the one that was read: the table was restored from a backup, or "
        "recreated, and has been written to since. Read anew what depends on it, with a new checkpoint and an empty sink",
        condition="DATA_LOST.HISTORY_CHANGED",
        version=version,
    )


@runtime_checkable
class PlannedChangelog(Changelog, Protocol):
    """A feed whose tables may get other columns while a query runs.

    A query is planned with the columns that the feed was described with. Rows that do not fit them end it, before they are read.
    """

    def describe(self, after: int | None = None) -> Description:
        """The feed as a reader has to know it that begins after a version; after the oldest one when None."""

    def follow(self, plan: str | None, columns: Sequence[str], *, some_columns: bool) -> None:
        """Read as the feed was described; called before anything else in a process that reads.

        Parameters
        ----------
        plan
            That of the description; None for how the feed is now.
        columns
            The names of the columns that are read.
        some_columns
            Whether the reader named them, so that it does not mind others.
        """

    def stream_start(self) -> dict[str, Any]:
        """What a new query keeps in its checkpoint beside its version; JSON."""

    def stream_end(self, after: int, state: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """In the place of ``newest`` for a stream: the version up to which the plan fits, and what to keep with it.

        Parameters
        ----------
        state
            What was kept with ``after``.

        Raises
        ------
        FeedUnavailable
            When the next commit does not fit the plan.
        """


@runtime_checkable
class WatchedChangelog(Changelog, Protocol):
    """A feed whose system somebody may have to look after."""

    def warnings(self) -> Sequence[str]:
        """What is wrong now, for people; asked for with each micro-batch."""


def described(feed: Changelog, after: int | None) -> Description:
    """A feed as a reader has to know it that begins after a version."""
    return feed.describe(after) if isinstance(feed, PlannedChangelog) else feed.describe()


def begins_late(name: str, first: int) -> FeedUnavailable:
    """The error of a feed of a table of which a new query would miss what was written before a version."""
    return FeedUnavailable(
        f"{name}: its changes can be read from version {first} on; what came before has been cleaned up, or is in another form, and a "
        f"new query would miss it: give starting_version={first} to take what is left, and bring in the rows from before that in "
        "another way where they are wanted",
        condition="FEED_UNAVAILABLE.BEGINS_LATE",
        first=first,
    )


def change_rows(
    data: pa.RecordBatch, schema: pa.Schema, *, change_type: str | pa.Array, version: int, timestamp: int
) -> pa.RecordBatch:
    """Rows of one commit in a read's schema: data columns by name, a null for those that the data does not have."""
    rows = data.num_rows
    arrays = []
    for field in schema:
        if field.name == CHANGE_TYPE:
            arrays.append(pa.repeat(change_type, rows) if isinstance(change_type, str) else change_type)
        elif field.name == COMMIT_VERSION:
            arrays.append(pa.repeat(pa.scalar(version, pa.int64()), rows))
        elif field.name == COMMIT_TIMESTAMP:
            arrays.append(pa.repeat(pa.scalar(timestamp, INSTANT), rows))
        else:
            arrays.append(conformed(data, field))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def conformed(data: pa.RecordBatch, field: pa.Field) -> pa.Array:
    """A column as the read wants it: absent ones are null, others are cast where nothing is lost by it."""
    place = data.schema.get_field_index(field.name)
    if place < 0:
        return pa.nulls(data.num_rows, field.type)
    column = data.column(place)
    return column if column.type.equals(field.type) else column.cast(field.type)


# ---- columns: Whether the columns of a system's data can be those of a feed.

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
