"""A queue: append, read, trim, merge, grow in partitions and in columns."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import column_names, did_you_mean, in_quotes
from penstock.arrow.python_rows import to_table
from penstock.errors import InvalidInput, InvalidPosition, PartitionNotFound, SchemaMismatch, StoreError
from penstock.queue.checks import check_name, check_whole_index, check_whole_partition, refuse_feed
from penstock.queue.consumer import Consumer
from penstock.queue.evolution import add_columns, grow, new_columns
from penstock.queue.info import QueueInfo as QueueInfo
from penstock.queue.info import queue_info
from penstock.queue.maintenance import Maintainer, Retention, limits_of, trim_partition, upkeep
from penstock.queue.placement import Placement
from penstock.queue.placement import placement_of as placement_of
from penstock.store.database import Database, Transaction
from penstock.store.log import compact, partition_log
from penstock.store.log.segmenting import Segment, to_segments
from penstock.store.records import catalog
from penstock.store.records.catalog import PartitionRecord, QueueRecord
from penstock.store.watch_queue import watch
from penstock.store.watching import Watch

logger = logging.getLogger("penstock.queue")

_GROWTHS = 10

Rows: TypeAlias = pa.Table | pa.RecordBatch | Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class AppendResult:
    """Where the rows of one append went."""

    ranges: dict[int, tuple[int, int]]
    """The first and end row index of each partition that the append touched."""
    skipped: bool = False
    """Whether a producer session had appended this sequence number before, so that nothing was done now."""

    @property
    def rows(self) -> int:
        """How many rows were appended."""
        return sum(end - first for first, end in self.ranges.values())


class Queue:
    """An ordered, append-only, partitioned table; get one from ``Store.queue``.

    It has the columns that the queue had when it was opened. Those that are added elsewhere come with :meth:`refresh`, and with rows or
    a read that name them.
    """

    def __init__(
        self, database: Database, store_uuid: str, record: QueueRecord, maintainer: Maintainer
    ) -> None:
        self._database = database
        self._store_uuid = store_uuid
        self._record = record
        self._maintainer = maintainer
        self._placed: tuple[QueueRecord, Placement] | None = None
        self._turn = itertools.count(random.randrange(1 << 16))

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._record.name

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return self._record.schema

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of which equal values share a partition."""
        return self._record.key

    @property
    def partitions(self) -> int:
        """How many there are, as of when the queue was looked up or refreshed."""
        return self._record.partitions

    @property
    def record(self) -> QueueRecord:
        return self._record

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {self.partitions} partitions, {self._database.url})"

    def append(self, rows: Rows, partition: int | None = None, *, connection: Any = None) -> AppendResult:
        """Append rows, all of them or none, over all the partitions they touch.

        Parameters
        ----------
        rows
            A table, a batch, or dicts; columns go by name.
        partition
            The partition; by default that of each row's key, or any one when the queue has no key.
        connection
            The caller's own ``sqlite3`` or ``psycopg`` connection: the append becomes part of its transaction, which
            the caller commits. Until then it holds up the other appends to the partitions it touches (in SQLite, to the
            file). SQLite commits a transaction over several attached files at once unless the machine stops meanwhile;
            tables in the store's own file have no such gap.

        Raises
        ------
        SchemaMismatch
            When a row does not fit; nothing is appended then.
        PartitionNotFound
            When there is no such partition.
        InvalidInput
            When a row's key does not belong into the partition, or the connection is not one to this store or has no
            transaction.
        CommitOutcomeUnknown
            When the connection broke while the append was committing; a producer session knows.
        """
        appended = self.append_with(rows, partition, connection=connection)
        return AppendResult(appended.ranges)

    def append_with(
        self,
        rows: Rows,
        partition: int | None = None,
        *,
        connection: Any = None,
        first: Callable[[Transaction], bool] | None = None,
        then: Callable[[Transaction, partition_log.Appended], None] | None = None,
        idempotent: bool = False,
    ) -> partition_log.Appended:
        """Append in one transaction with ``first``, which may end it by returning False, and with ``then``."""
        table = self.conformed(rows, lambda record: record.schema)
        if then is None:
            refuse_feed(self._record)
        if partition is not None:
            self._check_partition(partition)
        for _ in range(_GROWTHS):
            record, placement = self._current_placement()
            segments = self._segments(table, partition, placement)
            if not segments and first is None:
                return partition_log.Appended({})
            try:
                return self._append(record, segments, connection, first, then, idempotent)
            except partition_log.QueueGrown:
                # Nothing of it has happened: place the rows anew.
                self.refresh()
        raise StoreError(f"queue {self.name!r} gets more partitions all the time: try again")

    def conformed(self, rows: Rows, columns: Callable[[QueueRecord], pa.Schema]) -> pa.Table:
        """The rows with some of the queue's columns; it is looked up again when they have others than are known here."""
        rows = _kept(rows)
        before = self._record
        try:
            return to_table(rows, columns(before))
        except SchemaMismatch:
            self.refresh()
            if self._record.added_bytes == before.added_bytes:
                raise
        return to_table(rows, columns(self._record))

    def _append(
        self,
        record: QueueRecord,
        segments: list[Segment],
        connection: Any,
        first: Callable[[Transaction], bool] | None,
        then: Callable[[Transaction, partition_log.Appended], None] | None,
        idempotent: bool,
    ) -> partition_log.Appended:
        def work(tx: Transaction) -> partition_log.Appended:
            if first is not None and not first(tx):
                return partition_log.Appended({})
            appended = partition_log.append(tx, record, segments)
            if then is not None:
                then(tx, appended)
            return appended

        if connection is not None:
            with self._database.borrowed(connection) as tx:
                return work(tx)
        appended = self._database.run(work, idempotent=idempotent)
        # What is said of an append is made only where somebody wants it.
        if appended.ranges and logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "%d rows are appended to queue %r",
                appended.rows,
                record.name,
                extra={
                    "action": "appended",
                    "queue": record.name,
                    "rows": appended.rows,
                    "partitions": len(appended.ranges),
                },
            )
        self._maintainer.after_change(record, appended.crowded)
        return appended

    def _segments(self, table: pa.Table, partition: int | None, placement: Placement) -> list[Segment]:
        # In SQLite one writer holds up all others, so that nothing is left to do while it does.
        lazy = self._database.dialect != "sqlite"
        if partition is not None:
            self._check_keys(table, partition, placement)
            return to_segments(table, partition, lazy=lazy)
        return [
            segment
            for target, rows in placement.split(table, next(self._turn))
            for segment in to_segments(rows, target, lazy=lazy)
        ]

    def _check_keys(self, table: pa.Table, partition: int, placement: Placement) -> None:
        if not placement.key or table.num_rows == 0:
            return
        astray = pc.index(pc.not_equal(placement.targets(table), partition), True).as_py()
        if astray >= 0:
            raise InvalidInput(
                f"queue {self.name!r} keeps equal keys together, and the key of row {astray} does not belong into "
                f"partition {partition}: leave the partition out",
                row=astray,
                partition=partition,
            )

    def _current_placement(self) -> tuple[QueueRecord, Placement]:
        if self._placed is None:
            record = self._record
            self._placed = record, placement_of(self._database, record)
        return self._placed

    def refresh(self) -> None:
        """Read the queue's record again: its partitions, columns and retention may have changed.

        Raises
        ------
        QueueNotFound
            When the queue was dropped, also where there is another one of that name by now.
        """
        self._record = self._database.run(lambda tx: catalog.reread(tx, self._record), write=False)
        self._placed = None

    def _check_partition(self, partition: int) -> None:
        check_whole_partition(partition)
        if not 0 <= partition < self.partitions:
            self.refresh()
        if not 0 <= partition < self.partitions:
            raise PartitionNotFound(
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
        """Rows [start, end) of a partition.

        Parameters
        ----------
        partition
            The partition's number, from 0.
        start, end
            Row indexes; up to the newest row when ``end`` is None, and never past it.
        max_rows, max_bytes
            Stop after so many rows, or once so many bytes of Arrow data have been read (one row at the least).
        columns
            The column or columns to read; all when None. Rows from before a column was added have nulls in it.

        Raises
        ------
        DataLost
            When a part of the range has been trimmed.
        PartitionNotFound, InvalidPosition
            When there is no such partition, or the range is reversed or starts behind the newest row.
        """
        self._check_partition(partition)
        for name, limit in (("max_rows", max_rows), ("max_bytes", max_bytes)):
            if limit is not None and (type(limit) is not int or limit < 1):
                raise InvalidInput(f"{name} is 1 or more, not {limit!r}")
        check_whole_index(start, 0 if end is None else end)
        there = self._partition(partition)
        if not 0 <= start <= there.next_index or (end is not None and end < start):
            raise InvalidPosition(
                f"queue {self.name!r}, partition {partition}, has rows {there.first_index} to {there.next_index}: "
                f"cannot read [{start}, {'…' if end is None else end})"
            )
        stop = min(there.next_index if end is None else end, there.next_index)
        if max_rows is not None:
            stop = min(stop, start + max_rows)
        named = None if columns is None else column_names("columns", columns)
        if named is not None and not set(named) <= set(self.schema.names):
            self.refresh()
        record = self._record
        schema = record.schema if named is None else _selected(record.schema, named)
        chunks = partition_log.read(self._database, record, partition, start, stop, columns=named)
        return pa.Table.from_batches(_within(chunks, max_bytes), schema=schema)

    def _partition(self, partition: int) -> PartitionRecord:
        return self._database.run(lambda tx: catalog.lock_partition(tx, self._record, partition), write=False)

    def watch(self, partitions: Collection[int] | None = None) -> Watch:
        """What wakes its caller soon after anybody has appended rows; close it after use.

        Parameters
        ----------
        partitions
            The partitions that matter to the caller; all when None.
        """
        return watch(self._database, self._record, partitions)

    def register(self, consumer: str, *, vital: bool | None = None, start: Any = "earliest") -> Consumer:
        """Register a consumer on this queue; it is there afterwards, and ``Consumer.register`` does the same from its side.

        Parameters
        ----------
        consumer
            The name of an existing consumer.
        vital, start
            As for ``Consumer.register``.

        Raises
        ------
        ConsumerNotFound
        """
        check_name("consumer", consumer)
        found = Consumer(self._database, self._store_uuid, consumer, self._maintainer)
        found.register(self.name, vital=vital, start=start)
        return found

    def trim(self, partition: int | None = None, before: int | None = None) -> int:
        """Drop old rows; how many went.

        Parameters
        ----------
        partition
            All when None.
        before
            Drop the rows below this row index; by default what the retention lets go. Never past what the
            retention keeps, the safe offset of a vital consumer, or the micro-batch that a live query has in hand.
        """
        if before is not None and type(before) is not int:
            raise InvalidInput(f"a row index is a whole number, not {before!r}")
        self.refresh()
        if partition is not None:
            self._check_partition(partition)
        wanted = range(self.partitions) if partition is None else [partition]
        cuts = [trim_partition(self._database, self._store_uuid, self._record, p, before) for p in wanted]
        return sum(after - first for first, after in cuts)

    def merge(self) -> int:
        """Merge small segments as far as they may grow; the number of segments that went."""
        self.refresh()
        return sum(compact.merge_all(self._database, self._record, p) for p in range(self.partitions))

    def maintain(self) -> None:
        """Do the upkeep that otherwise happens beside appends: merge crowds of segments, apply the retention."""
        self.refresh()
        upkeep(self._database, self._store_uuid, self._record, range(self.partitions))

    def set_retention(self, retention: Retention) -> None:
        """Replace the queue's retention.

        Parameters
        ----------
        retention
            How much to keep; ``Retention()`` keeps everything.
        """
        limits = limits_of(retention)
        self._database.run(lambda tx: catalog.set_retention(tx, self._record, limits), idempotent=True)
        self.refresh()

    def add_partitions(self, count: int) -> int:
        """Add partitions; the new number of them.

        Equal keys stay together: keys that are in the queue remain in their partitions, new keys spread over all.

        Parameters
        ----------
        count
            How many to add, from 1.

        Raises
        ------
        InvalidInput
            When there would be more than 4096.
        """
        if type(count) is not int or count < 1:
            raise InvalidInput(f"the number of partitions to add is 1 or more, not {count!r}")
        self.refresh()
        grow(self._database, self._record, count)
        self.refresh()
        logger.info(
            "queue %r has %d partitions now",
            self.name,
            self.partitions,
            extra={"action": "queue_grown", "queue": self.name, "partitions": self.partitions},
        )
        return self.partitions

    def add_columns(self, columns: Any) -> pa.Schema:
        """Add nullable columns at the end; the queue's columns now.

        Rows that are there have nulls in them. Whoever knows fewer columns goes on: producers append rows without the new ones, running
        queries and open queues read theirs. Columns that the queue has already are left as they are, so that a repeat does no harm.

        Parameters
        ----------
        columns
            Arrow fields, one or several; or, as for ``Store.create_queue``, a ``pyarrow.Schema`` or a PySpark ``StructType``.

        Raises
        ------
        SchemaMismatch
            When a column is not nullable, has a reserved name, or is there with another type.
        UnsupportedType, InvalidInput
        """
        add_columns(self._database, self._record, new_columns(columns))
        self.refresh()
        return self.schema

    def info(self) -> QueueInfo:
        """What the queue is and holds now."""
        return self._database.run(lambda tx: queue_info(tx, self._record), write=False)


def _kept(rows: Any) -> Any:
    """Rows that can be looked at twice."""
    if isinstance(rows, pa.Table | pa.RecordBatch):
        return rows
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(rows).read_all()
    return list(rows) if isinstance(rows, Iterator) else rows


def _selected(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    for name in columns:
        if name not in schema.names:
            raise SchemaMismatch(
                f"there is no column {in_quotes(name)}; the columns are {', '.join(schema.names)}."
                f"{did_you_mean(name, schema.names)}",
                column=name,
            )
    return pa.schema([schema.field(name) for name in columns])


def _within(chunks: Iterator[partition_log.Chunk], max_bytes: int | None) -> Iterator[pa.RecordBatch]:
    left = max_bytes
    for chunk in chunks:
        if left is None:
            yield chunk.batch
            continue
        size = chunk.batch.nbytes
        if size > left:
            rows = (
                max(1, chunk.batch.num_rows * left // size)
                if left == max_bytes
                else chunk.batch.num_rows * left // size
            )
            if rows:
                yield chunk.batch.slice(0, rows)
            return
        left -= size
        yield chunk.batch
