"""Queues: append, read, trim and compact rows; add partitions and columns."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import TypeAlias, TypeVar

import pyarrow as pa

from penstock.arguments import column_names
from penstock.arrow.python_rows import to_table
from penstock.arrow.schema import unknown_column
from penstock.errors import (
    InvalidInputError,
    InvalidPositionError,
    PartitionNotFoundError,
    SchemaMismatchError,
)
from penstock.queue.append_buffer import BATCH_BYTES, LINGER, AppendBuffer
from penstock.queue.appends import AppendResult, Rows
from penstock.queue.checks import check_name, check_whole_index, check_whole_partition, refuse_feed
from penstock.queue.consumer import Consumer, Position
from penstock.queue.evolution import add_columns, grow, new_columns, widen_columns, wider_columns
from penstock.queue.info import QueueInfo as QueueInfo
from penstock.queue.info import queue_info
from penstock.queue.maintenance import Maintainer, Retention, limits_of, maintain_partitions, trim_partition
from penstock.queue.placement import Placement
from penstock.queue.placement import placement_of as placement_of
from penstock.store.database import Database, Transaction
from penstock.store.log import compact, partition_log, reading
from penstock.store.log.partition_log import Appended
from penstock.store.log.payloads import write_objects
from penstock.store.log.segmenting import Segment
from penstock.store.records import catalog
from penstock.store.records.catalog import PartitionRecord, QueueRecord
from penstock.store.watch_queue import watch
from penstock.store.watching import Watch

logger = logging.getLogger("penstock.queue")

T = TypeVar("T")
_PLACEMENT_ATTEMPTS = 10

AppendHook: TypeAlias = Callable[[Transaction, Callable[[], Appended]], Appended]
"""A function that runs in a transaction. It calls its second argument to append the rows, or skips them."""


class Queue:
    """An append-only log of rows in partitions. Get one from ``Store.queue``.

    The object has the columns that the queue had when it was opened. It loads columns that other programs add
    when you call :meth:`refresh`, or when rows or a read name them.
    """

    def __init__(self, database: Database, record: QueueRecord, maintainer: Maintainer) -> None:
        self.database = database
        self._record = record
        self._maintainer = maintainer
        self._cached_placement: tuple[QueueRecord, Placement] | None = None
        self._round_robin = itertools.count(random.randrange(1 << 16))

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._record.name

    @property
    def schema(self) -> pa.Schema:
        """The queue's columns."""
        return self._record.schema

    @property
    def key(self) -> tuple[str, ...]:
        """The key columns. Rows with equal keys are in the same partition."""
        return self._record.key

    @property
    def partitions(self) -> int:
        """The number of partitions when the queue was opened or refreshed."""
        return self._record.partitions

    @property
    def record(self) -> QueueRecord:
        return self._record

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {self.partitions} partitions, {self.database.url})"

    def append(self, rows: Rows, partition: int | None = None, *, connection: object = None) -> AppendResult:
        """Append rows in one transaction.

        Parameters
        ----------
        rows
            An Arrow table, a record batch, or dicts. Columns are matched by name.
        partition
            The partition; by default the partition of each row's key, or any one if the queue has no key.
        connection
            Your own ``sqlite3`` or ``psycopg`` connection to the store's database. The append becomes part of
            its transaction, which you commit. Until then, other appends to the same partitions (in SQLite, to
            the whole file) wait. If a transaction in SQLite covers several attached files, a crash of the
            machine may commit it in only some of them. Tables in the store's own file are safe.

        Raises
        ------
        SchemaMismatchError
            When a row does not fit; nothing is appended.
        PartitionNotFoundError
            When the queue has no such partition.
        InvalidInputError
            When a row's key belongs to another partition, or the connection is not to this store or has no
            open transaction.
        CommitOutcomeUnknownError
            When the connection broke during the commit. With a producer session, you can safely repeat the
            append.
        """
        refuse_feed(self._record)
        return AppendResult(self.append_with(rows, partition, connection=connection).ranges)

    def buffer(self, *, linger: timedelta = LINGER, batch_bytes: int = BATCH_BYTES) -> AppendBuffer:
        """Return a buffer that gathers rows and appends them together.

        Use a buffer in programs that append a few rows many times a second. One large append costs a fraction
        of many small ones. It also goes to the queue's object storage if its rows take at least 64 KiB
        compressed.

        Parameters
        ----------
        linger
            The longest time that the first row of a batch waits for more rows; by default 250 ms.
        batch_bytes
            A batch is appended as soon as its rows reach this many bytes, uncompressed; by default 8 MiB.

        Raises
        ------
        InvalidInputError
            When the queue holds a change feed.
        """
        refuse_feed(self._record)
        return AppendBuffer(
            self.name, self.rows_to_append, lambda table, _: self.append(table), linger, batch_bytes
        )

    def append_with(
        self,
        rows: Rows,
        partition: int | None = None,
        *,
        connection: object = None,
        hook: AppendHook | None = None,
        idempotent: bool = False,
    ) -> Appended:
        """Append rows in one transaction, in which ``hook`` may do more before and after the append."""
        rows = _rereadable(rows)
        if partition is not None:
            self._check_partition(partition)

        def attempt() -> Appended:
            table = self.rows_to_append(rows)
            record, placement = self.current_placement()
            segments = self.segments_of(table, placement, partition)
            if not segments and hook is None:
                return Appended()
            return self._append(record, segments, connection, hook, idempotent)

        return self.retry_placement(attempt)

    def segments_of(
        self, rows: pa.Table, placement: Placement, partition: int | None = None
    ) -> list[Segment]:
        """Divide rows into the segments of an append."""
        # In SQLite a writer blocks all other writers, so compress before the transaction.
        lazy = self.database.dialect != "sqlite"
        return placement.segments(rows, partition, next(self._round_robin), lazy=lazy)

    def retry_placement(self, attempt: Callable[[], T]) -> T:
        """Call ``attempt`` and return its result. Repeat it if the queue's partitions or columns have
        changed.
        """
        attempts = itertools.count(1)
        while True:
            try:
                return attempt()
            except catalog.QueueChanged:
                # Nothing was written: place the rows again.
                self.refresh()
                if next(attempts) == _PLACEMENT_ATTEMPTS:
                    raise

    def rows_to_append(self, rows: Rows) -> pa.Table:
        """Convert rows to a table with the queue's columns, and refuse rows that do not fit."""
        return self.conformed(rows, lambda record: record.schema)

    def conformed(self, rows: Rows, columns: Callable[[QueueRecord], pa.Schema]) -> pa.Table:
        """Convert rows to the queue's columns. If the rows have unknown columns, refresh the queue first."""
        rows = _rereadable(rows)
        while True:
            record = self._record
            try:
                return to_table(rows, columns(record))
            except SchemaMismatchError:
                self.refresh()
                if self._record.columns == record.columns:
                    raise

    def _append(
        self,
        record: QueueRecord,
        segments: list[Segment],
        connection: object,
        hook: AppendHook | None,
        idempotent: bool,
    ) -> Appended:
        write_objects(self.database, record, segments)

        def work(tx: Transaction) -> Appended:
            if hook is None:
                return partition_log.append(tx, record, segments)
            return hook(tx, lambda: partition_log.append(tx, record, segments))

        if connection is not None:
            with self.database.caller_transaction(connection) as tx:
                return work(tx)
        appended = self.database.run(work, idempotent=idempotent)
        # Building the fields takes longer than checking the level.
        if appended.partitions and logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "%d rows are appended to queue %r",
                appended.rows,
                record.name,
                extra={
                    "action": "appended",
                    "queue": record.name,
                    "rows": appended.rows,
                    "partitions": len(appended.partitions),
                },
            )
        self.after_append(record, appended)
        return appended

    def after_append(self, record: QueueRecord, appended: Appended) -> None:
        """Schedule the compaction of partitions with many small segments and the deletion of old rows."""
        self._maintainer.after_change(record, appended.to_compact)

    def current_placement(self) -> tuple[QueueRecord, Placement]:
        if self._cached_placement is None:
            record = self._record
            self._cached_placement = record, placement_of(self.database, record)
        return self._cached_placement

    def refresh(self) -> None:
        """Reload the queue's partitions, columns and retention from the store.

        Raises
        ------
        QueueNotFoundError
            When the queue was dropped, even if another queue has its name now.
        """
        self._record = self.database.run(lambda tx: catalog.reload_queue(tx, self._record), write=False)
        self._cached_placement = None

    def _check_partition(self, partition: int) -> None:
        check_whole_partition(partition)
        if not 0 <= partition < self.partitions:
            self.refresh()
        if not 0 <= partition < self.partitions:
            raise PartitionNotFoundError(
                f"queue {self.name!r} has partitions 0 to {self.partitions - 1}, not {partition}",
                queue=self.name,
                partition=partition,
            )

    def read(
        self,
        partition: int,
        start: int,
        end: int | None = None,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        columns: str | Sequence[str] | None = None,
    ) -> pa.Table:
        """Return rows [start, end) of a partition.

        Parameters
        ----------
        partition
            The partition's number, from 0.
        start, end
            Row indexes. If ``end`` is None, read to the newest row.
        max_rows, max_bytes
            The largest number of rows, or of bytes of Arrow data, to return. At least one row is returned.
            Without a limit, the whole range is read into memory.
        columns
            The column or columns to read; None reads all. Rows have nulls in columns that were added after
            them.

        Raises
        ------
        DataLostError
            When part of the range has been trimmed.
        PartitionNotFoundError, InvalidPositionError
            When the queue has no such partition, or the range is reversed or starts after the newest row.
        """
        self._check_partition(partition)
        for name, limit in (("max_rows", max_rows), ("max_bytes", max_bytes)):
            if limit is not None and (type(limit) is not int or limit < 1):
                raise InvalidInputError(f"{name} is 1 or more, not {limit!r}")
        check_whole_index(start, 0 if end is None else end)
        bounds = self._partition(partition)
        if not 0 <= start <= bounds.next_index or (end is not None and end < start):
            condition = "INVALID_POSITION" if start < 0 else "INVALID_POSITION.PAST_END"
            if end is not None and end < start:
                condition = "INVALID_POSITION.BACKWARDS"
            raise InvalidPositionError(
                f"queue {self.name!r}, partition {partition}, has rows {bounds.first_index} to "
                f"{bounds.next_index}: cannot read [{start}, {'…' if end is None else end})",
                condition=condition,
            )
        read_end = bounds.next_index if end is None else min(end, bounds.next_index)
        if max_rows is not None:
            read_end = min(read_end, start + max_rows)
        column_list = None if columns is None else column_names("columns", columns)
        if column_list is not None and not set(column_list) <= set(self.schema.names):
            self.refresh()
        record = self._record
        schema = record.schema if column_list is None else _select_columns(record.schema, column_list)
        requested = reading.Range(partition, start, read_end)
        chunks = reading.read(self.database, record, [requested], columns=column_list)
        return pa.Table.from_batches(_limit_bytes(chunks, max_bytes), schema=schema)

    def _partition(self, partition: int) -> PartitionRecord:
        return self.database.run(lambda tx: catalog.lock_partition(tx, self._record, partition), write=False)

    def watch(self, partitions: Collection[int] | None = None) -> Watch:
        """Return a watch that wakes when rows are appended. Close it after use.

        Parameters
        ----------
        partitions
            The partitions to watch; None watches all.
        """
        return watch(self.database, self._record, partitions)

    def register(self, consumer: str, *, vital: bool | None = None, start: Position = "earliest") -> Consumer:
        """Register a consumer on this queue, as ``Consumer.register`` does.

        Parameters
        ----------
        consumer
            The name of an existing consumer.
        vital
            Whether trimming waits for this consumer. By default, False for a new registration, and unchanged
            for an existing one.
        start
            ``earliest``, ``latest``, a datetime with a time zone (the first row at or after it) or
            ``{partition: row index}``.

        Raises
        ------
        ConsumerNotFoundError
        """
        check_name("consumer", consumer)
        registered = Consumer(self.database, consumer, self._maintainer)
        registered.register(self.name, vital=vital, start=start)
        return registered

    def trim(self, partition: int | None = None, before: int | None = None) -> int:
        """Delete old rows, and return how many were deleted.

        Parameters
        ----------
        partition
            The partition to trim; None trims all partitions.
        before
            Delete only rows below this row index; by default, all rows that the retention does not keep.
            Never deleted are rows that the retention keeps, rows after the safe offset of a vital consumer,
            and rows of a running query's micro-batch in flight.
        """
        if before is not None and type(before) is not int:
            raise InvalidInputError(f"a row index is a whole number, not {before!r}")
        self.refresh()
        if partition is not None:
            self._check_partition(partition)
        partitions = range(self.partitions) if partition is None else [partition]
        trimmed = [trim_partition(self.database, self._record, number, before) for number in partitions]
        return sum(end - start for start, end in trimmed)

    def compact(self) -> int:
        """Compact small segments into large ones, and return by how many the number of segments fell."""
        self.refresh()
        return compact.compact_all(self.database, self._record, range(self.partitions))

    def maintain(self) -> None:
        """Run the queue's background maintenance now: compact segments and apply the retention."""
        self.refresh()
        maintain_partitions(self.database, self._record, range(self.partitions))

    def set_retention(self, retention: Retention) -> None:
        """Replace the queue's retention.

        Parameters
        ----------
        retention
            How many rows to keep; ``Retention()`` keeps everything.
        """
        limits = limits_of(retention)
        self.database.run(lambda tx: catalog.set_retention(tx, self._record, limits), idempotent=True)
        self.refresh()

    def add_partitions(self, count: int) -> int:
        """Add partitions, and return the new number of partitions.

        Rows with equal keys still share a partition: existing keys stay in their partitions, and new keys are
        spread over all partitions.

        Parameters
        ----------
        count
            How many partitions to add, at least 1.

        Raises
        ------
        InvalidInputError
            When the queue would have more than 10,000 partitions.
        """
        if type(count) is not int or count < 1:
            raise InvalidInputError(f"the number of partitions to add is 1 or more, not {count!r}")
        self.refresh()
        grow(self.database, self._record, count)
        self.refresh()
        logger.info(
            "queue %r has %d partitions now",
            self.name,
            self.partitions,
            extra={"action": "queue_grown", "queue": self.name, "partitions": self.partitions},
        )
        return self.partitions

    def add_columns(self, columns: object) -> pa.Schema:
        """Add nullable columns at the end, and return the queue's columns.

        Existing rows have nulls in the new columns. Programs that know fewer columns keep working: producers
        append rows without the new columns, and running queries and open queues read the columns that they
        know. Columns that the queue already has are ignored, so you can repeat the call.

        Parameters
        ----------
        columns
            One or several Arrow fields; or, as for ``Store.create_queue``, a ``pyarrow.Schema`` or a PySpark
            ``StructType``.

        Raises
        ------
        SchemaMismatchError
            When a column is not nullable, has a reserved name, or exists with another type.
        UnsupportedTypeError, InvalidInputError
        """
        add_columns(self.database, self._record, new_columns(columns))
        self.refresh()
        return self.schema

    def widen_columns(self, columns: object) -> pa.Schema:
        """Give columns wider types, and return the queue's columns.

        Stored rows are not rewritten, but read as the new type. Programs that know the narrower type keep
        working: producers append its values, and running queries and open queues read it, until a row has a
        value that does not fit (SCHEMA_MISMATCH.COLUMN_WIDENED). A restarted query uses the wider type, and
        resumes where it stopped. Columns that are already that wide are ignored, so you can repeat the call.

        Parameters
        ----------
        columns
            Existing columns with their new types, as for ``add_columns``. The new type is a larger integer or
            float, or a decimal with more digits, and no fewer digits before or after its point. A decimal in
            the key keeps its scale.

        Raises
        ------
        SchemaMismatchError
            When a column does not exist, or cannot be changed to that type.
        UnsupportedTypeError, InvalidInputError
        """
        widen_columns(self.database, self._record, wider_columns(columns))
        self.refresh()
        return self.schema

    def info(self) -> QueueInfo:
        """Return the queue's settings and size."""
        return self.database.run(lambda tx: queue_info(tx, self._record), write=False)


def _rereadable(rows: Rows) -> Rows:
    """Return rows that can be read twice."""
    if isinstance(rows, pa.Table | pa.RecordBatch):
        return rows
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(rows).read_all()
    return list(rows) if isinstance(rows, Iterator) else rows


def _select_columns(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    for name in columns:
        if name not in schema.names:
            raise unknown_column(name, schema)
    return pa.schema([schema.field(name) for name in columns])


def _limit_bytes(chunks: Iterator[reading.Chunk], max_bytes: int | None) -> Iterator[pa.RecordBatch]:
    bytes_left = max_bytes
    for chunk in chunks:
        if bytes_left is None:
            yield chunk.batch
            continue
        size = chunk.batch.nbytes
        if size > bytes_left:
            rows = chunk.batch.num_rows * bytes_left // size
            if rows or bytes_left == max_bytes:
                yield chunk.batch.slice(0, max(1, rows))
            return
        bytes_left -= size
        yield chunk.batch
