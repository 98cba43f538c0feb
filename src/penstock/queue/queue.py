"""A queue: append, read, trim, merge, grow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from penstock.arrow.keys import key_hash
from penstock.arrow.rows import to_table
from penstock.errors import InvalidInput, InvalidPosition, PartitionNotFound
from penstock.queue.consumer import Consumer
from penstock.queue.maintenance import Maintainer, trim_partition, upkeep
from penstock.queue.placement import Home, Placement, home_of
from penstock.queue.retention import Retention
from penstock.store import catalog, consumers, log, merge
from penstock.store.catalog import PartitionRecord, QueueRecord
from penstock.store.database import Database, Transaction
from penstock.store.log import Segment

Rows = pa.Table | pa.RecordBatch | Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class AppendResult:
    """Where the rows of one append went."""

    ranges: dict[int, tuple[int, int]]
    """The first and end row index of each partition that the append touched."""
    skipped: bool = False
    """Whether a producer session had appended this sequence number before, so that nothing was done now."""

    @property
    def rows(self) -> int:
        return sum(end - first for first, end in self.ranges.values())


@dataclass(frozen=True)
class PartitionInfo:
    partition: int
    first_index: int
    next_index: int
    bytes: int
    segments: int
    last_append: datetime | None

    @property
    def rows(self) -> int:
        return self.next_index - self.first_index


@dataclass(frozen=True)
class QueueInfo:
    """What a queue is and holds; bytes are compressed ones."""

    name: str
    schema: pa.Schema
    key: tuple[str, ...]
    retention: Retention
    created_at: datetime
    partitions: tuple[PartitionInfo, ...]
    consumers: tuple[str, ...]

    @property
    def rows(self) -> int:
        return sum(partition.rows for partition in self.partitions)

    @property
    def bytes(self) -> int:
        return sum(partition.bytes for partition in self.partitions)


class Queue:
    """An ordered, append-only, partitioned table with a fixed schema; get one from ``Store.queue``."""

    def __init__(self, database: Database, store_uuid: str, record: QueueRecord, maintainer: Maintainer) -> None:
        self._database = database
        self._store_uuid = store_uuid
        self._record = record
        self._maintainer = maintainer
        self._placement: Placement | None = None
        self._turn = itertools.count(random.randrange(1 << 16))

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def schema(self) -> pa.Schema:
        return self._record.schema

    @property
    def key(self) -> tuple[str, ...]:
        return self._record.key

    @property
    def partitions(self) -> int:
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
            the caller commits.

        Raises
        ------
        SchemaMismatch
            When a row does not fit; nothing is appended then.
        PartitionNotFound
            When there is no such partition.
        """
        appended = self.append_with(rows, partition, connection=connection)
        return AppendResult(appended.ranges)

    def append_with(
        self,
        rows: Rows,
        partition: int | None = None,
        *,
        connection: Any = None,
        first: Any = None,
        idempotent: bool = False,
    ) -> log.Appended:
        """Append in one transaction with ``first``, which may end it by returning False."""
        table = to_table(rows, self.schema)
        if partition is not None:
            self._check_partition(partition)
        while True:
            placement = self._current_placement()
            segments = self._segments(table, partition, placement)

            def work(tx: Transaction, segments: list[Segment] = segments, placement: Placement = placement) -> Any:
                if first is not None and first(tx) is False:
                    return log.Appended({})
                appended = log.append(tx, self._record, segments)
                if self.key and catalog.find_queue(tx, self.name).partitions != placement.partitions:
                    raise _GrownError
                return appended

            try:
                if connection is not None:
                    appended: log.Appended = work(self._database.borrowed(connection))
                else:
                    appended = self._database.run(work, idempotent=idempotent)
            except _GrownError:
                if connection is not None:
                    raise InvalidInput(
                        f"queue {self.name!r} got more partitions meanwhile: roll your transaction back and repeat it"
                    ) from None
                self.refresh()
                continue
            if connection is None:
                self._maintainer.after_change(self._record, appended.crowded)
            return appended

    def _segments(self, table: pa.Table, partition: int | None, placement: Placement) -> list[Segment]:
        if partition is not None:
            return log.to_segments(table, partition)
        return [
            segment
            for target, rows in placement.split(table, next(self._turn))
            for segment in log.to_segments(rows, target)
        ]

    def _current_placement(self) -> Placement:
        if self._placement is None:
            self._placement = placement_of(self._database, self._record)
        return self._placement

    def refresh(self) -> None:
        """Read the queue's record again: its partitions and retention may have changed."""
        self._record = self._database.run(lambda tx: catalog.find_queue(tx, self.name), write=False)
        self._placement = None

    def _check_partition(self, partition: int) -> None:
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
        columns: list[str] | None = None,
    ) -> pa.Table:
        """Rows [start, end) of a partition.

        Parameters
        ----------
        start, end
            Row indexes; up to the newest row when ``end`` is None, and never past it.
        max_rows, max_bytes
            Stop after so many rows, or once so many bytes of Arrow data have been read (one row at the least).
        columns
            The columns to read; all when None.

        Raises
        ------
        DataLost
            When a part of the range has been trimmed.
        PartitionNotFound, InvalidPosition
            When there is no such partition, or the range is reversed or starts behind the newest row.
        """
        self._check_partition(partition)
        there = self._partition(partition)
        if not 0 <= start <= there.next_index or (end is not None and end < start):
            raise InvalidPosition(
                f"queue {self.name!r}, partition {partition}, has rows {there.first_index} to {there.next_index}: "
                f"cannot read [{start}, {'…' if end is None else end})"
            )
        stop = min(there.next_index if end is None else end, there.next_index)
        if max_rows is not None:
            stop = min(stop, start + max_rows)
        schema = self.schema if columns is None else pa.schema([self.schema.field(name) for name in columns])
        chunks = log.read(self._database, self._record, partition, start, stop, columns=columns)
        return pa.Table.from_batches(_within(chunks, max_bytes), schema=schema)

    def _partition(self, partition: int) -> PartitionRecord:
        return self._database.run(lambda tx: catalog.partitions(tx, self._record), write=False)[partition]

    def register(self, consumer: str, *, vital: bool = False, start: Any = "earliest") -> Consumer:
        """Register a consumer on this queue; see :meth:`Consumer.register`."""
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
        if partition is not None:
            self._check_partition(partition)
        self.refresh()
        wanted = range(self.partitions) if partition is None else [partition]
        cuts = [trim_partition(self._database, self._store_uuid, self._record, p, before) for p in wanted]
        return sum(after - first for first, after in cuts)

    def merge(self) -> int:
        """Merge small segments as far as they may grow; the number of segments that went."""
        return sum(merge.merge_all(self._database, self._record, p) for p in range(self.partitions))

    def maintain(self) -> None:
        """Do the upkeep that otherwise happens beside appends: merge crowds of segments, apply the retention."""
        self.refresh()
        upkeep(self._database, self._store_uuid, self._record, range(self.partitions))

    def set_retention(self, retention: Retention) -> None:
        """Replace the queue's retention."""
        self._database.run(lambda tx: catalog.set_retention(tx, self._record, retention.limits()), idempotent=True)
        self.refresh()

    def add_partitions(self, count: int) -> int:
        """Add partitions; the new number of them.

        Equal keys stay together: keys that are in the queue remain in their partitions, new keys spread over all.
        """
        if not isinstance(count, int) or count < 1:
            raise InvalidInput(f"the number of partitions to add is 1 or more, not {count!r}")
        self.refresh()
        seen, upto = self._hashes({}) if self.key else ([], {})

        def work(tx: Transaction) -> None:
            record = catalog.find_queue(tx, self.name, lock=True)
            for partition in range(record.partitions):
                catalog.lock_partition(tx, record, partition)
            if self.key:
                rest = self._hashes(upto, tx)[0]
                home = home_of(record.partitions, [*seen, *rest])
                tx.run("insert_key_home", queue_id=record.queue_id, partitions=home.partitions, hashes=home.bits)
            grown = record.partitions + count
            tx.run("set_partitions", queue_id=record.queue_id, partitions=grown)
            tx.many(
                "insert_partition",
                [{"queue_id": record.queue_id, "partition": p} for p in range(record.partitions, grown)],
            )
            consumers.add_partition_positions(tx, record, record.partitions, grown)

        self._database.run(work)
        self.refresh()
        return self.partitions

    def _hashes(self, upto: dict[int, int], tx: Transaction | None = None) -> tuple[list[pa.Array], dict[int, int]]:
        """The key hashes of the rows from ``upto`` on, and where they end; inside ``tx`` when it is given."""
        source = self._database if tx is None else _Inside(tx)
        found, ends = [], {}
        for there in source.run(lambda tx: catalog.partitions(tx, self._record), write=False):
            start = max(there.first_index, upto.get(there.partition, 0))
            ends[there.partition] = there.next_index
            for chunk in log.read(
                source, self._record, there.partition, start, there.next_index, columns=self.key, on_lost="skip"
            ):
                found.append(key_hash(chunk.batch, self.key))
        return found, ends

    def info(self) -> QueueInfo:
        """What the queue is and holds now."""

        def work(tx: Transaction) -> QueueInfo:
            record = catalog.find_queue(tx, self.name)
            return QueueInfo(
                record.name,
                record.schema,
                record.key,
                Retention.of(record.retention),
                datetime.fromtimestamp(record.created_at / 1e6, UTC),
                tuple(_partition_info(partition) for partition in catalog.partitions(tx, record)),
                tuple(registration.consumer for registration in consumers.registrations_of(tx, record)),
            )

        return self._database.run(work, write=False)


class _GrownError(Exception):
    """The queue got more partitions between the placing of the rows and their append."""


class _Inside:
    """A database whose every run is the transaction in hand."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    def run(self, work: Any, *, write: bool = True) -> Any:
        return work(self._tx)


def _partition_info(record: PartitionRecord) -> PartitionInfo:
    appended = datetime.fromtimestamp(record.last_timestamp / 1e6, UTC) if record.last_timestamp else None
    return PartitionInfo(
        record.partition, record.first_index, record.next_index, record.bytes, record.segments, appended
    )


def placement_of(database: Database, record: QueueRecord) -> Placement:
    """How the queue places rows now."""
    if not record.key:
        return Placement((), record.partitions)
    rows = database.run(lambda tx: tx.all("read_key_homes", queue_id=record.queue_id), write=False)
    homes = tuple(Home(row.partitions, bytes(row.hashes)) for row in rows if row.partitions < record.partitions)
    return Placement(record.key, record.partitions, homes)


def _within(chunks: Iterator[log.Chunk], max_bytes: int | None) -> Iterator[pa.RecordBatch]:
    left = max_bytes
    for chunk in chunks:
        if left is None:
            yield chunk.batch
            continue
        size = chunk.batch.nbytes
        if size > left:
            rows = max(1, chunk.batch.num_rows * left // size) if left == max_bytes else chunk.batch.num_rows * left // size
            if rows:
                yield chunk.batch.slice(0, rows)
            return
        left -= size
        yield chunk.batch


