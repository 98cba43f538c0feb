"""Placement of rows in partitions.

Rows of a keyed queue go to partition ``hash(key) mod partitions``. When partitions are added, existing keys
stay in their partitions. A bitmap records the hashes of these keys, with one bit for hash ``h`` at ``h mod
size``. Keys whose bit is set are placed as before. A new key whose bit happens to be set also goes to one of
the old partitions. This does no harm, since all writers use the same bitmap. The bitmap is a Bloom filter
with one hash function (Bloom, "Space/time trade-offs in hash coding with allowable errors", 1970).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow.arrays import Rows, u32, u32_array
from penstock.arrow.key_hash import key_hash
from penstock.errors import InvalidInputError
from penstock.json_text import unreadable_record
from penstock.store.database import Database, Row
from penstock.store.log.segmenting import SEGMENT_ROWS, Segment, to_segments
from penstock.store.records.catalog import QueueChanged, QueueRecord
from penstock.store.records.queue_columns import QueueColumns

_MIN_BITS, _MAX_BITS = 1 << 16, 1 << 27
_BLOCK_BITS = 1 << 20


@dataclass(frozen=True)
class KnownKeys:
    """A bitmap of the keys that existed when the queue had ``partitions`` partitions."""

    partitions: int
    bits: bytes

    def contains(self, hashes: pa.Array) -> pa.Array:
        size = len(self.bits) * 8
        bitmap = pa.Array.from_buffers(pa.bool_(), size, [None, pa.py_buffer(self.bits)])
        return bitmap.take(pc.bit_wise_and(hashes, u32(size - 1)))


class DistinctHashes:
    """A set of hashes, to which arrays of hashes can be added."""

    def __init__(self, distinct: pa.Array | None = None) -> None:
        self._distinct = u32_array([]) if distinct is None else distinct
        self._pending: list[pa.Array] = []
        self._pending_count = 0

    def add(self, hashes: pa.Array) -> None:
        part = pc.unique(hashes)
        self._pending.append(part)
        self._pending_count += len(part)
        # This is rare enough for the total time to be linear in the number of hashes.
        if self._pending_count > max(_BLOCK_BITS, len(self._distinct)):
            self.distinct()

    def distinct(self) -> pa.Array:
        if self._pending:
            self._distinct = pc.unique(pa.concat_arrays([self._distinct, *self._pending]))
            self._pending, self._pending_count = [], 0
        return self._distinct

    def copy(self) -> DistinctHashes:
        return DistinctHashes(self.distinct())


def known_keys_of(partitions: int, hashes: Iterable[pa.Array]) -> KnownKeys:
    """Return a bitmap of keys by their hashes. With 16 bits per key, 6 % of other keys also have their bit
    set.
    """
    distinct_hashes = DistinctHashes()
    for part in hashes:
        distinct_hashes.add(part)
    distinct = distinct_hashes.distinct()
    size = min(max(_MIN_BITS, 1 << (16 * len(distinct)).bit_length()), _MAX_BITS)
    return KnownKeys(partitions, _bitmap(pc.unique(pc.bit_wise_and(distinct, u32(size - 1))), size))


def _bitmap(slots: pa.Array, size: int) -> bytes:
    """Return a bitmap of ``size`` bits with the given bits set. It is built in blocks to save memory."""
    ascending = slots.take(pc.array_sort_indices(slots))
    block = min(_BLOCK_BITS, size)
    positions = pc.subtract(pc.cumulative_sum(pa.repeat(u32(1), block)), u32(1))
    bits, first = bytearray(), 0
    for start in range(0, size, block):
        end = bisect_left(ascending, start + block, lo=first, key=lambda slot: slot.as_py())
        block_slots = pc.subtract(ascending.slice(first, end - first), u32(start))
        bits += pc.is_in(positions, value_set=block_slots).buffers()[1].to_pybytes()[: block // 8]
        first = end
    return bytes(bits)


@dataclass(frozen=True)
class Placement:
    """The placement of a queue's rows for a given number of partitions."""

    key: tuple[str, ...]
    partitions: int
    columns: QueueColumns
    """The queue's current and earlier columns."""
    known_keys: tuple[KnownKeys, ...] = ()

    def segments(
        self,
        rows: pa.Table | pa.RecordBatch,
        partition: int | None,
        fallback: int,
        *,
        max_rows: int = SEGMENT_ROWS,
        lazy: bool = False,
    ) -> list[Segment]:
        """Divide rows into segments of their partitions, in order.

        All rows go to ``partition``. If it is None, each row goes to the partition of its key. If the queue
        has no key either, all rows go to the partition that the number ``fallback`` chooses.
        """
        columns_id = self.columns.id_of(rows.schema)
        if columns_id is None:
            # Another thread has reloaded the queue, from before or after it had these columns.
            raise QueueChanged(
                "the queue's columns changed while rows were prepared for it, so none of the rows are "
                "visible: repeat the append"
            )
        parts = self._split_by_partition(rows, fallback) if partition is None else [(partition, rows)]
        if partition is not None and self.key and rows.num_rows:
            self._require_partition(rows, partition)
        return [
            segment
            for target, part in parts
            for segment in to_segments(part, target, columns_id=columns_id, max_rows=max_rows, lazy=lazy)
        ]

    def _split_by_partition(self, rows: Rows, fallback: int) -> list[tuple[int, Rows]]:
        if rows.num_rows == 0:
            return []
        if not self.key or self.partitions == 1:
            return [(fallback % self.partitions, rows)]
        targets = self.targets(rows)
        if rows.num_rows == 1:
            return [(targets[0].as_py(), rows)]
        order = pc.array_sort_indices(targets)
        ordered, counts = rows.take(order), pc.value_counts(targets.take(order))
        return _split_sorted(ordered, counts.field("values").to_pylist(), counts.field("counts").to_pylist())

    def _require_partition(self, rows: pa.Table | pa.RecordBatch, partition: int) -> None:
        targets = self.targets(rows)
        row = pc.index(pc.not_equal(targets, partition), True).as_py()
        if row >= 0:
            raise InvalidInputError(
                f"the key of row {row} belongs to partition {targets[row].as_py()}, not {partition}: "
                "rows with equal keys share a partition, so do not pass one",
                condition="INVALID_INPUT.KEY_IN_OTHER_PARTITION",
                row=row,
                partition=partition,
            )

    def targets(self, table: pa.Table | pa.RecordBatch) -> pa.Array:
        """Return the partition of each row."""
        hashes = key_hash(table, self.key)
        targets = _modulo(hashes, self.partitions)
        for known in reversed(self.known_keys):
            targets = pc.if_else(known.contains(hashes), _modulo(hashes, known.partitions), targets)
        return targets


def placement_of(database: Database, record: QueueRecord) -> Placement:
    """Return the queue's current placement."""
    if not record.key:
        return Placement((), record.partitions, record.columns)
    rows = database.run(lambda tx: tx.all("read_key_homes", queue_id=record.queue_id), write=False)
    unknown = set(record.key).difference(record.schema.names)
    if unknown:
        reason = ValueError("it is not a column of the queue")
        raise unreadable_record(f"the key of queue {record.name!r}", reason)
    known = tuple(_known_keys(record, row) for row in rows if row.partitions < record.partitions)
    return Placement(record.key, record.partitions, record.columns, known)


def _known_keys(record: QueueRecord, row: Row) -> KnownKeys:
    bits = bytes(row.hashes or b"")
    size = len(bits) * 8
    if row.partitions < 1 or not _MIN_BITS <= size <= _MAX_BITS or size & (size - 1):
        reason = ValueError(f"{row.partitions} partitions with {len(bits)} bytes")
        raise unreadable_record(f"the keys that queue {record.name!r} had when it grew", reason)
    return KnownKeys(row.partitions, bits)


def _split_sorted(
    ordered: pa.Table, partitions: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, pa.Table]]:
    pieces, start = [], 0
    for partition, count in zip(partitions, counts, strict=True):
        pieces.append((partition, ordered.slice(start, count)))
        start += count
    return pieces


def _modulo(hashes: pa.Array, partitions: int) -> pa.Array:
    count = u32(partitions)
    return pc.subtract(hashes, pc.multiply(pc.divide(hashes, count), count))
