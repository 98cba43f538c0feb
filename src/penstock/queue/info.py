"""Settings and sizes of queues, as users see them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from penstock.instants import moment_of
from penstock.json_text import unreadable_record
from penstock.queue.maintenance import Retention
from penstock.store.database import Transaction
from penstock.store.records import catalog, consumers
from penstock.store.records.catalog import PartitionRecord, QueueRecord


@dataclass(frozen=True)
class PartitionInfo:
    """The size of a partition."""

    partition: int
    first_index: int
    """The index of the oldest row. Earlier rows have been trimmed."""
    next_index: int
    """The index that the next appended row will get."""
    bytes: int
    """The compressed size of the rows in bytes."""
    segments: int
    last_append: datetime | None
    """When the newest row was appended, in UTC; None if no row has ever been appended."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.next_index - self.first_index


@dataclass(frozen=True)
class QueueInfo:
    """A queue's settings and size. Bytes are compressed bytes."""

    name: str
    schema: pa.Schema
    key: tuple[str, ...]
    retention: Retention
    created_at: datetime
    partitions: tuple[PartitionInfo, ...]
    consumers: tuple[str, ...]

    @property
    def rows(self) -> int:
        """The number of rows in all partitions."""
        return sum(partition.rows for partition in self.partitions)

    @property
    def bytes(self) -> int:
        """The compressed size of all rows in bytes."""
        return sum(partition.bytes for partition in self.partitions)


def queue_info(tx: Transaction, queue: QueueRecord) -> QueueInfo:
    record = catalog.reload_queue(tx, queue)
    return QueueInfo(
        record.name,
        record.schema,
        record.key,
        Retention.of(record.retention),
        _moment(record.created_at, record.name),
        tuple(_partition_info(partition, record.name) for partition in catalog.partitions(tx, record)),
        tuple(registration.consumer for registration in consumers.registrations_of(tx, record)),
    )


def _partition_info(record: PartitionRecord, queue: str) -> PartitionInfo:
    appended = _moment(record.last_timestamp, queue) if record.last_timestamp else None
    return PartitionInfo(
        record.partition, record.first_index, record.next_index, record.bytes, record.segments, appended
    )


def _moment(micros: int, queue: str) -> datetime:
    try:
        return moment_of(micros)
    except OverflowError as error:
        raise unreadable_record(f"a time of queue {queue!r}", error) from None
