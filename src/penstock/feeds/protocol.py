"""The interface between connectors of change feeds and the Spark data source.

A connector consists of two classes. A :class:`Feed` is a frozen description of what to read. It opens no
connection, and every process can recreate it from its URL. An :class:`OpenFeed` holds the connections of one
process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import DataLostError, FeedUnavailableError
from penstock.feeds.contract import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    ChangeContract,
    invalid_schema,
)
from penstock.json_text import Json

INSTANT = pa.timestamp("us", tz="UTC")
METADATA_FIELDS = (
    pa.field(CHANGE_TYPE, pa.string(), nullable=False),
    pa.field(COMMIT_VERSION, pa.int64(), nullable=False),
    pa.field(COMMIT_TIMESTAMP, INSTANT, nullable=False),
)
METADATA_NAMES = frozenset(field.name for field in METADATA_FIELDS)
Task: TypeAlias = Any
"""A part of a range; each feed has its own class, which can be pickled."""
PLAN = b"penstock.plan"
"""The key of the plan in the metadata of a read's schema."""


@dataclass(frozen=True)
class Commit:
    """One commit of a feed."""

    version: int
    timestamp: int
    """Microseconds since 1970, UTC."""
    rows: int
    """The number of change rows; an estimate if counting them requires reading them."""


@dataclass(frozen=True)
class Description:
    """The schema and contract of a feed at one moment."""

    identity: str
    """The identity of the feed, without secrets; a checkpoint of another feed is refused."""
    schema: pa.Schema
    """Data columns, then METADATA_FIELDS."""
    contract: ChangeContract | None
    """None if no columns identify rows, so that no pass is possible."""
    plan: str | None = None
    """The plan of the read, for feeds whose columns may change while a query runs."""

    @property
    def planned_schema(self) -> pa.Schema:
        """The schema of a read of all columns, with the plan in its metadata."""
        return with_plan(self.schema, self.plan)


@dataclass(frozen=True)
class PlannedRead:
    """A read that was planned with an earlier :class:`Description`."""

    plan: str | None
    """The plan of the description; None to read the feed as it is now."""
    columns: Sequence[str]
    """The names of the columns to read."""
    some_columns: bool
    """Whether the reader selected columns, so that other columns may be added or dropped."""


def with_plan(schema: pa.Schema, plan: str | None) -> pa.Schema:
    """Return a read's schema with the plan in its metadata, if there is a plan."""
    return schema if plan is None else schema.with_metadata({PLAN: plan.encode()})


class OpenFeed(ABC):
    """A change feed that is open in one process.

    Versions are integers that increase with each commit, not always by one. A range ``(after, upto]``
    contains the commits with a version greater than ``after`` and at most ``upto``. The ends need not be
    versions of commits. A range always contains the same rows, so that a replay of a micro-batch reads the
    same rows.
    """

    name: str
    """The feed for messages, without a password."""
    beginning: ClassVar[int | None] = None
    """The version before the first one, if a new query without a start has to read the whole table."""

    def close(self) -> None:
        """Close connections; by default there are none."""
        return

    @abstractmethod
    def describe(self, after: int | None = None) -> Description:
        """Describe the feed; called on the driver, once for each query.

        The read begins after the version ``after``, or at the oldest one if it is None. This matters only for
        feeds whose columns may change while a query runs. Raise ``FeedUnavailableError`` if the system
        refuses.
        """

    def prepare(self) -> int:
        """Return the version after which a new streaming query without a start reads; called on the driver.

        If the source system needs a resource for such a query, such as a replication slot, create it. This
        may be called again until the query has logged an offset. Raise ``FeedUnavailableError`` if the query
        would miss rows.
        """
        oldest = self.oldest()
        if self.beginning is not None and oldest > self.beginning:
            raise FeedUnavailableError(
                f"{self.name}: its changes can be read from version {oldest + 1} on; earlier changes were "
                "cleaned up, or cannot be read, and a new query would miss them. Set "
                f"starting_version={oldest + 1} to read from there, and load the earlier rows separately",
                condition="FEED_UNAVAILABLE.BEGINS_LATE",
                first=oldest + 1,
            )
        return oldest

    @abstractmethod
    def oldest(self) -> int:
        """Return the version after which all commits can still be read, without side effects."""

    @abstractmethod
    def newest(self, after: int) -> int:
        """Return the version up to which there are changes now; ``after`` if there are none after it.

        This is called before each micro-batch, so it has to be cheap.
        """

    @abstractmethod
    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        """Yield the commits of a range in order, lazily; the caller stops after ``rows`` rows.

        Raise ``DataLostError`` with the versions that can still be read if a part of the range is gone.
        """

    @abstractmethod
    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Task]:
        """Divide a range into picklable tasks of about ``rows_per_task`` rows, which may run in parallel.

        Raise ``DataLostError`` as :meth:`commits` does.
        """

    @abstractmethod
    def read(self, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read the change rows of a task on an executor, in batches with this schema.

        The schema has some or all of the described columns, in any order.
        """

    def logged(self, upto: int) -> None:
        """Acknowledge that Spark has logged all commits up to a version, so that the system may release them.

        This is called from time to time on the driver, possibly again for the same version, and after a crash
        for an older one. By default it does nothing.
        """
        return

    def commit_name(self, version: int) -> str | None:
        """Return a name that distinguishes a commit from another commit with the same version.

        Versions may be reused, for example after a table was restored. Return None if there is no such
        commit, if it can no longer be read, or if versions are never reused.
        """
        return None

    def stream_start(self) -> Json | None:
        """Return the state that a new query stores in its checkpoint with its version, as JSON, or None."""
        return None

    def stream_end(self, after: int, state: Json | None) -> int:
        """Return the version up to which a stream can read with its plan; ``state`` was stored with
        ``after``.

        Raise ``FeedUnavailableError`` if the next commit does not match the plan.
        """
        return self.newest(after)

    def stream_state(self, upto: int, state: Json | None) -> Json | None:
        """Return the state to store in the checkpoint with a version, which is at most the last stream end.

        ``state`` was stored with the previous version.
        """
        return None

    def finalized_until(self, upto: int) -> int | None:
        """Return the time before which all commits have a version of at most ``upto``.

        The time is in microseconds since 1970, or None if it is unknown. This is called after ``newest`` or
        ``stream_end``, with a version up to their result. By default it is the time of the last commit, which
        is correct if commit times never decrease.
        """
        return max((commit.timestamp for commit in self.commits(upto - 1, upto, 1)), default=None)

    def warnings(self) -> Sequence[str]:
        """Return current problems of the source system for users; called with each micro-batch."""
        return ()


@runtime_checkable
class Feed(Protocol):
    """A change feed: a frozen, picklable description of what to read, without open connections."""

    @property
    def url(self) -> str:
        """The feed as a URL, from which ``feeds.parse`` creates an equal feed; it may contain a password."""

    @property
    def name(self) -> str:
        """The feed for messages, without a password."""

    def open(self, planned: PlannedRead | None = None) -> OpenFeed:
        """Open the feed in this process.

        ``planned`` is the planned read, for feeds whose columns may change while a query runs. The query ends
        before rows that do not match the plan.
        """


def history_changed(name: str, version: int, newest: int | None = None) -> DataLostError:
    """Return the error for a version that was read, and is now another commit or gone."""
    current = "" if newest is None else f", and is at version {newest} now"
    return DataLostError(
        f"version {version} of {name} is no longer the commit that was read: the source was restored from a "
        f"backup, rolled back, replaced or recreated{current}. Start over with a new checkpoint and an "
        "empty sink",
        condition="DATA_LOST.HISTORY_CHANGED",
        version=version,
        newest=newest,
    )


def change_rows(
    data: pa.RecordBatch, schema: pa.Schema, *, change_type: str | pa.Array, version: int, timestamp: int
) -> pa.RecordBatch:
    """Return rows of one commit in the schema of a read; columns that the data does not have are null."""
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
            index = data.schema.get_field_index(field.name)
            column = pa.nulls(rows, field.type) if index < 0 else data.column(index)
            arrays.append(column if column.type.equals(field.type) else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def has_no_key(row_id: Iterable[str], data: pa.Schema) -> bool:
    """Whether a row id has all columns, so that the table has no key: NULLs and duplicates are allowed."""
    row_id_names = Counter(name.strip("`").lower() for name in row_id)
    return Counter(map(str.lower, data.names)) <= row_id_names


def check_reserved(names: Iterable[str], what: str, more: Iterable[str] = ()) -> None:
    """Refuse columns with the name of a metadata column (ignoring case) or of a column in ``more``."""
    reserved = METADATA_NAMES.union(more)
    reserved_name = next((name for name in names if name.lower() in reserved), None)
    if reserved_name is not None:
        raise invalid_schema(
            "RESERVED_COLUMN",
            reserved_name,
            f"{what} has a column {in_quotes(reserved_name)}, a name that is reserved for metadata: rename "
            "the column, or leave it out",
        )


def check_columns_exist(data: pa.Schema, what: str, wanted: Iterable[str | None]) -> None:
    """Refuse names of columns, or of struct fields (``a.b``), that the data does not have."""
    for name in filter(None, wanted):
        if name not in data.names and name.split(".")[0].strip("`") not in data.names:
            raise invalid_schema(
                "MISSING_COLUMN",
                name,
                f"{what} has no column {in_quotes(name)}, which its contract "
                f"names.{did_you_mean(name, data.names)}",
            )
