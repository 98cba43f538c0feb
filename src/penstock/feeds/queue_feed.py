"""``QueueFeed``: a change feed that is stored in a queue."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arguments import brief, require
from penstock.arrow.schema import canonical_schema
from penstock.errors import (
    ChangelogContractViolationError,
    DataLostError,
    FeedUnavailableError,
    InvalidInputError,
    PenstockError,
)
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION, TYPES, ChangeContract
from penstock.feeds.feed_writer import FeedRows, append_commits
from penstock.feeds.protocol import (
    METADATA_FIELDS,
    METADATA_NAMES,
    Commit,
    Description,
    OpenFeed,
    PlannedRead,
    Task,
    change_rows,
    check_columns_exist,
    check_reserved,
)
from penstock.feeds.urls import FeedUrl, pairs
from penstock.instants import micros_of
from penstock.json_text import parse_record, unreadable_record
from penstock.queue.appends import AppendResult, Rows
from penstock.queue.checks import check_name
from penstock.queue.maintenance import Retention
from penstock.queue.queue import Queue
from penstock.queue.store import open_store
from penstock.store.database import Transaction
from penstock.store.records import catalog, feed_commits, pumps
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.feed_commits import FeedCommit

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


T = TypeVar("T")


class OpenQueueFeed(OpenFeed):
    """A queue that is open as a change feed in one process."""

    def __init__(self, name: str, queue: str, store: str) -> None:
        self.name, self._queue, self._store = name, queue, store
        self._last: FeedCommit | None = None
        self._finalized_before: int | None = None
        """The time before which there were no commits after ``_last`` when it was read; None if unknown."""

    def describe(self, after: int | None = None) -> Description:
        store = open_store(self._store, verify=True)
        record = store.queue(self._queue).record
        identity = f"queue:{store.uuid}/{record.name}/{record.generation}"
        return Description(identity, record.schema, _contract_of(record))

    def oldest(self) -> int:
        return self._run(feed_commits.oldest_readable)

    def newest(self, after: int) -> int:
        self._last, self._finalized_before = self._run(_newest)
        return after if self._last is None else max(after, self._last.version)

    def finalized_until(self, upto: int) -> int | None:
        """Return the time of the last commit, or the later time before which the pump has all commits."""
        if self._last is not None and self._last.version > upto and self._finalized_before is not None:
            last = self._run(lambda tx, queue: feed_commits.newest_commit(tx, queue, upto))
            return None if last is None else last.timestamp
        return self._finalized_before

    def commit_name(self, version: int) -> str | None:
        """Return the version and time of the commit, or of the last one before it if it does not exist."""
        commit = self._run(lambda tx, queue: feed_commits.newest_commit(tx, queue, version))
        return None if commit is None else f"{commit.version}@{commit.timestamp}"

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        def page(tx: Transaction, queue: QueueRecord) -> list[FeedCommit]:
            self._require_retained(tx, queue, after)
            return feed_commits.list_page(tx, queue, after, upto)

        while commits := self._run(page):
            for commit in commits:
                yield Commit(commit.version, commit.timestamp, commit.rows)
            after = commits[-1].version

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Task]:
        from penstock.spark.options import SourceOptions
        from penstock.spark.ranges import split_into_tasks

        def bounds(tx: Transaction, queue: QueueRecord) -> tuple[list[int], list[int]]:
            self._require_retained(tx, queue, after)
            return (
                feed_commits.start_indexes(tx, queue, after),
                feed_commits.start_indexes(tx, queue, upto),
            )

        start, end = self._run(bounds)
        return split_into_tasks(start, end, rows_per_task, SourceOptions.max_tasks)

    def read(self, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        from penstock.spark.queue_readers import RangesPartition, Scan

        scan = Scan(self._store, open_store(self._store).queue(self._queue).record, schema)
        return scan.read(RangesPartition(task))

    def _run(self, work: Callable[[Transaction, QueueRecord], T]) -> T:
        store = open_store(self._store)
        record = store.queue(self._queue).record
        return store.database.run(lambda tx: work(tx, record), write=False)

    def _require_retained(self, tx: Transaction, queue: QueueRecord, after: int) -> None:
        """Refuse a range whose first rows have been trimmed."""
        oldest = feed_commits.oldest_readable(tx, queue)
        if after >= oldest:
            return
        first_indexes = [part.first_index for part in catalog.partitions(tx, queue)]
        starts = feed_commits.start_indexes(tx, queue, after)
        if any(start < first for start, first in zip(starts, first_indexes, strict=True)):
            raise DataLostError(
                f"the commits of {self.name} after {after} up to {oldest} have been trimmed: start from "
                f"version {oldest + 1}, with a new checkpoint",
                condition="DATA_LOST.TRIMMED",
                feed=self.name,
                after=after,
                oldest=oldest,
            )


def _newest(tx: Transaction, queue: QueueRecord) -> tuple[FeedCommit | None, int | None]:
    """Return the newest commit, and the time before which there are no later commits; None if unknown."""
    # Read the pump first: commits that it appends afterwards do not have an earlier time.
    pump = pumps.pump_of(tx, queue.name)
    last = feed_commits.newest_commit(tx, queue)
    times = [] if last is None else [last.timestamp]
    if pump is not None:
        if pump.is_copying(queue.name):
            return last, None
        times.append(pump.position.timestamp)
    return last, max(times, default=None)


class _WriterCache:
    """Cache of the queue that a process writes to, because a lookup costs as much as a commit."""

    def __init__(self) -> None:
        self._cached: tuple[int, Queue, ChangeContract] | None = None

    def queue(self, store: str, name: str) -> tuple[Queue, ChangeContract]:
        # A forked process needs its own connection.
        if self._cached is None or self._cached[0] != os.getpid():
            queue = open_store(store).queue(name)
            self._cached = os.getpid(), queue, _contract_of(queue.record)
        return self._cached[1:]

    def __reduce__(self) -> tuple[type[_WriterCache], tuple[()]]:
        return _WriterCache, ()


@dataclass(frozen=True)
class QueueFeed:
    """A change feed in a queue, to which programs append whole commits.

    Parameters
    ----------
    queue
        The queue's name; create it with :meth:`create`.
    store
        The URL of its store.
    """

    queue: str
    store: str = field(repr=False)
    _writer: _WriterCache = field(default_factory=_WriterCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name("queue", self.queue)
        require("store", self.store, str, "the URL of a store, such as 'sqlite:///shop.db'")

    @classmethod
    def create(
        cls,
        queue: str,
        schema: pa.Schema | StructType,
        contract: ChangeContract,
        *,
        store: str,
        partitions: int = 1,
        retention: Retention | None = None,
    ) -> QueueFeed:
        """Create a queue for a feed.

        Parameters
        ----------
        schema
            The data columns: a ``pyarrow.Schema`` or a PySpark ``StructType``.
        contract
            The contract of the rows. Rows with the same row id go to the same partition, if the row id has
            only top-level columns that are not nested.
        store
            The URL of an existing store.
        partitions
            1 to 10,000.
        retention
            How many rows to keep; all rows by default.

        Raises
        ------
        AlreadyExistsError, InvalidChangelogSchemaError, InvalidNameError, UnsupportedTypeError
        """
        feed = cls(queue, store)
        require("contract", contract, ChangeContract, "a penstock.ChangeContract")
        data = canonical_schema(schema)
        what = f"the schema of feed {queue!r}"
        check_reserved(data.names, what)
        _check_contract(contract, data, what)
        open_store(store).create_queue(
            queue,
            pa.schema([*data, *METADATA_FIELDS]),
            partitions=partitions,
            key=_key(data, contract),
            retention=retention,
            contract=json.dumps(asdict(contract)),
        )
        return feed

    def append_commit(self, version: int, timestamp: datetime, rows: Rows) -> AppendResult:
        """Append a commit atomically.

        Parameters
        ----------
        version
            An integer of at least 0, greater than the version of the newest commit.
        timestamp
            The commit time, with a time zone; not earlier than that of the newest commit.
        rows
            Its change rows (a table, a batch, or dicts): the data columns and ``_change_type``.

        Raises
        ------
        CommitOutOfOrderError
            When the version or the timestamp is out of order. A writer that was killed finds its last commit
            with ``newest``.
        SchemaMismatchError
            When a row does not match the schema.
        ChangelogContractViolationError
            When a row has an unknown change type, or a NULL in its row id, which would stop all readers.
            After an error nothing is appended.
        """
        micros = _check_commit(version, timestamp)
        queue, contract = self._writer.queue(self.store, self.queue)
        table = queue.conformed(rows, _written_schema).combine_chunks()
        batch = (
            table.to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], schema=table.schema)
        )
        _check_changes(table, contract)
        commit = change_rows(
            batch, queue.schema, change_type=batch.column(CHANGE_TYPE), version=version, timestamp=micros
        )
        rows = FeedRows(queue, pa.Table.from_batches([commit]), [version], [micros], [commit.num_rows])
        (appended,) = append_commits(queue.database, [rows])
        return AppendResult(appended.ranges)

    def newest(self, after: int) -> int:
        """Return the version of the newest commit; ``after`` if there is none after it."""
        return self.open().newest(after)

    @property
    def url(self) -> str:
        return str(FeedUrl("queue", self.queue, pairs(store=self.store)))

    @property
    def name(self) -> str:
        return f"queue {self.queue!r}"

    @classmethod
    def from_url(cls, url: str) -> QueueFeed:
        parts = FeedUrl.of(url)
        parts.require_known(["store"])
        store = parts.one("store")
        if store is None:
            raise FeedUnavailableError(
                f"the URL of the feed of queue {parts.target!r} needs a store: "
                f"queue:{parts.target}?store=sqlite:///penstock.db",
                condition="FEED_UNAVAILABLE.STORE_MISSING",
            )
        return cls(parts.target, store)

    def open(self, planned: PlannedRead | None = None) -> OpenQueueFeed:
        """Open the feed in this process."""
        return OpenQueueFeed(self.name, self.queue, self.store)


def _check_commit(version: object, timestamp: object) -> int:
    """Check the version and time of a commit; return the time in microseconds since 1970."""
    if type(version) is not int or not 0 <= version < 2**63:
        raise InvalidInputError(f"a commit's version is a whole number from 0 to 2**63 - 1, not {version!r}")
    if not isinstance(timestamp, datetime) or timestamp.tzinfo is None:
        raise InvalidInputError(f"a commit's timestamp is a datetime with a time zone, not {timestamp!r}")
    return micros_of(timestamp)


def _contract_of(record: QueueRecord) -> ChangeContract:
    if record.contract is None:
        raise FeedUnavailableError(
            f"queue {record.name!r} is not a change feed: create a feed with QueueFeed.create, or read the "
            "queue with format('penstock') and use penstock.changes.post_process",
            condition="FEED_UNAVAILABLE.NOT_A_FEED",
            queue=record.name,
        )
    what = f"the contract of queue {record.name!r}"
    stored = parse_record(record.contract, what, dict)
    try:
        # Always true for a queue feed: commits are appended whole, and a micro-batch has whole commits.
        contract = ChangeContract(**stored | {"whole_commits": True})
        _check_contract(contract, _data_columns(record.schema), "its queue")
    except (PenstockError, TypeError, ValueError) as error:
        # The record may contain long texts.
        why = error.message if isinstance(error, PenstockError) else brief(str(error))
        raise unreadable_record(what, ValueError(why)) from None
    return contract


def _check_contract(contract: ChangeContract, data: pa.Schema, what: str) -> None:
    """Refuse a contract with columns that the data does not have."""
    columns = [*contract.row_id, contract.row_version, contract.sequence, contract.unchanged]
    check_columns_exist(data, what, columns)


def _data_columns(schema: pa.Schema) -> pa.Schema:
    """Return the data columns of a feed's queue; raise if a metadata column is missing."""
    for wanted in METADATA_FIELDS:
        if wanted.name not in schema.names or schema.field(wanted.name).type != wanted.type:
            raise ValueError(f"its queue has no column {wanted.name} of type {wanted.type}")
    return pa.schema([column for column in schema if column.name not in METADATA_NAMES])


@lru_cache(maxsize=64)
def _written_schema(queue: QueueRecord) -> pa.Schema:
    """Return the columns that a writer of commits passes."""
    return pa.schema(
        [field for field in queue.schema if field.name not in (COMMIT_VERSION, COMMIT_TIMESTAMP)]
    )


def _check_changes(rows: pa.Table, contract: ChangeContract) -> None:
    known = pa.array(TYPES, rows.schema.field(CHANGE_TYPE).type)
    unknown = pc.invert(pc.is_in(rows[CHANGE_TYPE], value_set=known))
    if pc.any(unknown).as_py():
        change_type = rows[CHANGE_TYPE][pc.index(unknown, True).as_py()].as_py()
        raise ChangelogContractViolationError(
            f"{CHANGE_TYPE} is {change_type!r}: set it to one of {', '.join(TYPES)}",
            condition="CHANGELOG_CONTRACT_VIOLATION.UNEXPECTED_CHANGE_TYPE",
        )
    names = () if contract.nullable_row_id else contract.row_id
    null_column = next((name for name in names if name in rows.column_names and rows[name].null_count), None)
    if null_column is not None:
        raise ChangelogContractViolationError(
            f"{null_column} is NULL: set the row id of every row",
            condition="CHANGELOG_CONTRACT_VIOLATION.NULL_ROW_ID",
        )


def _key(data: pa.Schema, contract: ChangeContract) -> tuple[str, ...]:
    """Return the key of the queue: the row id, if it has only top-level columns that are not nested."""
    is_flat = all(name in data.names and not pat.is_nested(data.field(name).type) for name in contract.row_id)
    return tuple(contract.row_id) if is_flat else ()
