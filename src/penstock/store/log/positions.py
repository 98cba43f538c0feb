"""Positions in a queue: resolve the start, the end or a time to a row index in each partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import InvalidPositionError
from penstock.store.database import Transaction
from penstock.store.log.trim import first_row_since
from penstock.store.records.catalog import PartitionRecord, QueueRecord, lock_partitions

Position = str | int | Mapping[int, int]


def resolve(tx: Transaction, queue: QueueRecord, position: Position) -> list[int]:
    """Return the row index of a position in each partition. A write transaction locks the partitions.

    A position is ``earliest``, ``latest``, microseconds since 1970 (the first row appended at or after that
    time), or a mapping of partitions to row indexes. Partitions missing from the mapping start at
    ``earliest``.
    """
    records = lock_partitions(tx, queue)
    if position == "earliest":
        return [record.first_index for record in records]
    if position == "latest":
        return [record.next_index for record in records]
    if isinstance(position, int) and not isinstance(position, bool):
        now = tx.now()
        return [first_row_since(tx, queue, record, position, now) for record in records]
    if isinstance(position, Mapping):
        return _offsets_of_mapping(queue, records, position)
    raise InvalidPositionError(
        f"a position is 'earliest', 'latest', a datetime or {{partition: row index}}, not {position!r}"
    )


def _offsets_of_mapping(
    queue: QueueRecord, records: Sequence[PartitionRecord], position: Mapping[int, int]
) -> list[int]:
    offsets = [record.first_index for record in records]
    for partition, index in position.items():
        if type(partition) is not int or type(index) is not int:
            raise InvalidPositionError(
                f"partitions and row indexes are whole numbers, not {partition!r}: {index!r}"
            )
        if not 0 <= partition < len(records):
            raise InvalidPositionError(
                f"queue {queue.name!r} has partitions 0 to {len(records) - 1}, not {partition}",
                condition="INVALID_POSITION.UNKNOWN_PARTITION",
            )
        record = records[partition]
        if not record.first_index <= index <= record.next_index:
            condition = "INVALID_POSITION.PAST_END"
            if index < record.first_index:
                condition = "INVALID_POSITION" if index < 0 else "INVALID_POSITION.TRIMMED"
            raise InvalidPositionError(
                f"queue {queue.name!r}, partition {partition}, has rows {record.first_index} to "
                f"{record.next_index}, not {index}: a position must be in this range, including both ends",
                condition=condition,
            )
        offsets[partition] = index
    return offsets
