"""What a queue is and holds, for people."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from penstock.queue.maintenance import Retention
from penstock.store.database import Transaction
from penstock.store.records import catalog, consumers
from penstock.store.records.catalog import PartitionRecord, QueueRecord


@dataclass(frozen=True)
class PartitionInfo:
    """What a partition holds."""

    partition: int
    first_index: int
    """The index of its oldest row; the rows before it have been trimmed."""
    next_index: int
    """The index that the next row will have."""
    bytes: int
    """Compressed."""
    segments: int
    last_append: datetime | None
    """When its newest row was appended, in UTC; None when there never was one."""

    @property
    def rows(self) -> int:
        """How many rows there are."""
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
        """How many rows there are, in all partitions."""
        return sum(partition.rows for partition in self.partitions)

    @property
    def bytes(self) -> int:
        """Their compressed size."""
        return sum(partition.bytes for partition in self.partitions)


def queue_info(tx: Transaction, queue: QueueRecord) -> QueueInfo:
    record = catalog.reread(tx, queue)
    return QueueInfo(
        record.name,
        record.schema,
        record.key,
        Retention.of(record.retention),
        _time(record.created_at),
        tuple(_partition_info(partition) for partition in catalog.partitions(tx, record)),
        tuple(registration.consumer for registration in consumers.registrations_of(tx, record)),
    )


def _partition_info(record: PartitionRecord) -> PartitionInfo:
    appended = _time(record.last_timestamp) if record.last_timestamp else None
    return PartitionInfo(
        record.partition, record.first_index, record.next_index, record.bytes, record.segments, appended
    )


def _time(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds // 1_000_000, UTC).replace(
        microsecond=microseconds % 1_000_000
    )
