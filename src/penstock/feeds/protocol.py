"""The interface between connectors of change feeds and the Spark data source.

A connector is two classes. A :class:`Feed` is a frozen description of what to read, which opens nothing;
it can be rebuilt in every process from its URL. An :class:`OpenFeed` holds what one process has open for
it.
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
"""A part of a range, of a class of the feed's own that can be pickled."""
PLAN = b"penstock.plan"
"""The metadata key of a read's schema that holds the plan of a description."""


@dataclass(frozen=True)
class Commit:
    """One commit of a feed."""

    version: int
    timestamp: int
    """Microseconds since 1970, UTC."""
    rows: int
    """Its change rows; an estimate if counting them means reading them."""


@dataclass(frozen=True)
class Description:
    """The schema and contract of a feed at one moment."""

    identity: str
    """Identifies the feed, without a secret: a checkpoint of another feed is refused."""
    schema: pa.Schema
    """Data columns, then METADATA_FIELDS."""
    contract: ChangeContract | None
    """None if nothing identifies rows; no pass can be done then."""
    plan: str | None = None
    """What a feed whose columns change needs to read as described."""

    @property
    def planned_schema(self) -> pa.Schema:
        """The schema of a read of all columns that is planned with this description."""
        return with_plan(self.schema, self.plan)


@dataclass(frozen=True)
class PlannedRead:
    """A read that was planned with a description."""

    plan: str | None
    """The plan of the description; None for the feed as it is now."""
    columns: Sequence[str]
    """The names of the columns to read."""
    some_columns: bool
    """Whether the reader named the columns, so that other columns may come and go."""


def with_plan(schema: pa.Schema, plan: str | None) -> pa.Schema:
    """Return a read's schema with the plan of a description, if it has one."""
    return schema if plan is None else schema.with_metadata({PLAN: plan.encode()})


class OpenFeed(ABC):
    """A feed of changes that is open in one process.

    Versions are whole numbers that ascend with the commits, not always by one. A range ``(after, upto]``
    means the commits with a version above ``after`` and not above ``upto``; neither end has to be a commit's
    version. A range always holds the same rows, so that a repeated micro-batch does too.
    """

    name: str
    """The feed for messages, without a password."""
    beginning: ClassVar[int | None] = None
    """The version before the table's first one, if a new query without a start has to read all of it."""

    def close(self) -> None:
        """Close connections; by default there are none."""
        return

    @abstractmethod
    def describe(self, after: int | None = None) -> Description:
        """Describe the feed; called in the driver, once for each query.

        ``after`` is where the read begins, the oldest version when None: only a feed whose columns may change
        while a query runs depends on it. It raises ``FeedUnavailableError`` when the system refuses.
        """

    def prepare(self) -> int:
        """Return the version after which a new streaming query without a start reads; called in the driver.

        If the system has to keep something for such a query, this creates it. It may be called again until
        the query has logged something. It raises ``FeedUnavailableError`` if the query would miss rows.
        """
        oldest = self.oldest()
        if self.beginning is not None and oldest > self.beginning:
            raise FeedUnavailableError(
                f"{self.name}: its changes can be read from version {oldest + 1} on; earlier ones were "
                "cleaned up, or have another form, and a new query would miss them. Set "
                f"starting_version={oldest + 1} to read what is left, and load the earlier rows separately",
                condition="FEED_UNAVAILABLE.BEGINS_LATE",
                first=oldest + 1,
            )
        return oldest

    @abstractmethod
    def oldest(self) -> int:
        """Return the version after which everything can still be read; creates nothing."""

    @abstractmethod
    def newest(self, after: int) -> int:
        """Return the version up to which there are changes now; ``after`` if there are none above it.

        Called before each micro-batch: it has to be cheap.
        """

    @abstractmethod
    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        """Yield the commits of a range in order, read lazily; the caller stops after that many ``rows``.

        It raises ``DataLostError`` when a part of the range is gone, naming the versions that are left.
        """

    @abstractmethod
    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Task]:
        """Divide a range into picklable tasks of about that many rows that can run in parallel.

        It raises ``DataLostError`` as :meth:`commits` does.
        """

    @abstractmethod
    def read(self, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read the change rows of a task, on an executor, in batches of exactly that schema.

        The schema has some or all of the described columns, in any order.
        """

    def logged(self, upto: int) -> None:
        """Note that Spark has logged everything up to a version for good, so that the system may release it.

        Called now and then in the driver; it may be called again, and after a crash for an older version. By
        default nothing has to be released.
        """
        return

    def commit_name(self, version: int) -> str | None:
        """Return what distinguishes a commit from another one of the same version, as of a restored table.

        None if there is no such commit, if it cannot be read any more, or if versions are never reused.
        """
        return None

    def stream_start(self) -> Json | None:
        """Return what a new query stores in its checkpoint besides its version, as JSON; None for nothing."""
        return None

    def stream_end(self, after: int, state: Json | None) -> int:
        """Return the version up to which a stream's plan fits; ``state`` was kept with ``after``.

        It raises ``FeedUnavailableError`` when the next commit does not fit the plan.
        """
        return self.newest(after)

    def stream_state(self, upto: int, state: Json | None) -> Json | None:
        """Return what to keep in the checkpoint with a version up to the end that was found last.

        ``state`` was kept with the version before.
        """
        return None

    def finalized_until(self, upto: int) -> int | None:
        """Return a time before which every commit is at most a version, in microseconds since 1970.

        None if that is not known. Called after ``newest`` or ``stream_end``, with a version up to their
        result. By default the time of the last commit, which is right where commit times never fall.
        """
        return max((commit.timestamp for commit in self.commits(upto - 1, upto, 1)), default=None)

    def warnings(self) -> Sequence[str]:
        """Return what is wrong with the system now, for people; called with each micro-batch."""
        return ()


@runtime_checkable
class Feed(Protocol):
    """A feed of changes: what to read and where, as a frozen, picklable description that opens nothing."""

    @property
    def url(self) -> str:
        """The feed's URL form, from which ``feeds.parse`` makes an equal feed; it may hold a password."""

    @property
    def name(self) -> str:
        """The feed for messages, without a password."""

    def open(self, planned: PlannedRead | None = None) -> OpenFeed:
        """Open the feed in this process.

        ``planned`` is the read that was planned, for feeds whose columns may change while a query runs. Rows
        that do not fit it end the query before they are read.
        """


def history_changed(name: str, version: int, newest: int | None = None) -> DataLostError:
    """Return the error for a version that has been read, and is another commit now, or none."""
    now = "" if newest is None else f", and is at version {newest} now"
    return DataLostError(
        f"version {version} of {name} is no longer the commit that was read: it was restored from a backup, "
        f"rolled back, replaced or recreated{now}. Start over with a new checkpoint and an "
        "empty sink",
        condition="DATA_LOST.HISTORY_CHANGED",
        version=version,
        newest=newest,
    )


def change_rows(
    data: pa.RecordBatch, schema: pa.Schema, *, change_type: str | pa.Array, version: int, timestamp: int
) -> pa.RecordBatch:
    """Return rows of one commit in a read's schema: data columns by name, null where the data lacks one."""
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
    """Whether a row id names all columns, as for a table without a key: they may be NULL, and rows equal."""
    named = Counter(name.strip("`").lower() for name in row_id)
    return Counter(map(str.lower, data.names)) <= named


def check_reserved(names: Iterable[str], what: str, more: Iterable[str] = ()) -> None:
    """Refuse columns with the names of metadata columns, in any case, or of ``more`` that the feed adds."""
    reserved = METADATA_NAMES.union(more)
    taken = next((name for name in names if name.lower() in reserved), None)
    if taken is not None:
        raise invalid_schema(
            "RESERVED_COLUMN",
            taken,
            f"{what} has a column {in_quotes(taken)}, which a change feed adds itself: rename it, or leave "
            "it out",
        )


def check_columns_exist(data: pa.Schema, what: str, wanted: Iterable[str | None]) -> None:
    """Refuse names of columns, or of fields in a struct (``a.b``), that the data does not have."""
    for name in filter(None, wanted):
        if name not in data.names and name.split(".")[0].strip("`") not in data.names:
            raise invalid_schema(
                "MISSING_COLUMN",
                name,
                f"{what} has no column {in_quotes(name)}, which its contract "
                f"names.{did_you_mean(name, data.names)}",
            )
