"""Start and end positions of reads, for the partitions of a queue as one statement sees them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from penstock.commit.offsets import pad
from penstock.errors import DataLost, InvalidPosition
from penstock.spark.options import SourceOptions
from penstock.store.database import Transaction
from penstock.store.records import consumers
from penstock.store.records.catalog import PartitionRecord, QueueRecord

log = logging.getLogger("penstock.spark")


def start_positions(
    tx: Transaction, options: SourceOptions, queue: QueueRecord, partitions: Sequence[PartitionRecord]
) -> list[int]:
    """Return the start of a read without a checkpoint, by partition; rows at the start may have been trimmed.

    Raises
    ------
    InvalidPosition
        When a row index is past the newest row, or its partition does not exist.
    """
    if options.consumer is not None:
        registration = consumers.find_registration(tx, options.consumer, queue.name)
        return list(pad(consumers.read_offsets(tx, registration)[0], len(partitions))[: len(partitions)])
    if options.starting_timestamp is not None:
        indexes = consumers.resolve(tx, queue, options.starting_timestamp)
        return [min(index, part.next_index) for index, part in zip(indexes, partitions, strict=False)]
    start = options.starting_offsets or "earliest"
    if isinstance(start, str):
        return [part.first_index if start == "earliest" else part.next_index for part in partitions]
    return _checked(queue, partitions, start, [part.first_index for part in partitions])


def end_positions(
    options: SourceOptions, queue: QueueRecord, partitions: Sequence[PartitionRecord], start: Sequence[int]
) -> list[int]:
    """Return the end of a batch read, by partition; never before its start.

    Raises
    ------
    InvalidPosition
        When a row index is past the newest row or before the start.
    """
    end = options.ending_offsets
    if isinstance(end, str):
        ends = [part.first_index if end == "earliest" else part.next_index for part in partitions]
    else:
        ends = _checked(queue, partitions, end, [part.next_index for part in partitions])
    if isinstance(options.starting_offsets, Mapping) and isinstance(end, Mapping):
        for partition in options.starting_offsets.keys() & end.keys():
            if ends[partition] < options.starting_offsets[partition]:
                raise InvalidPosition(
                    f"endingOffsets has row {ends[partition]} for partition {partition}, before "
                    f"startingOffsets' {options.starting_offsets[partition]}: exchange them",
                    partition=partition,
                )
    return [max(first, last) for first, last in zip(start, ends, strict=True)]


def _checked(
    queue: QueueRecord,
    partitions: Sequence[PartitionRecord],
    indexes: Mapping[int, int],
    others: Sequence[int],
) -> list[int]:
    """Return the checked row indexes by partition; those in ``others`` for partitions without one."""
    offsets = list(others)
    for partition, index in indexes.items():
        if not 0 <= partition < len(partitions):
            raise InvalidPosition(
                f"queue {queue.name!r} has partitions 0 to {len(partitions) - 1}, not {partition}",
                partition=partition,
            )
        end = partitions[partition].next_index
        if not 0 <= index <= end:
            raise InvalidPosition(
                f"queue {queue.name!r}, partition {partition}, has rows up to {end}, not {index}: give a "
                f"position from 0 to {end}",
                partition=partition,
            )
        offsets[partition] = index
    return offsets


def skip_trimmed(
    options: SourceOptions, partitions: Sequence[PartitionRecord], offsets: Sequence[int]
) -> list[int]:
    """Return the offsets, moved to the first rows that have not been trimmed.

    Raises
    ------
    DataLost
        When rows after an offset have been trimmed, and ``failOnDataLoss`` is true.
    """
    for part, offset in zip(partitions, offsets, strict=True):
        if offset < part.first_index:
            report_loss(
                options.queue, part.partition, offset, part.first_index, fail=options.fail_on_data_loss
            )
    return [max(offset, part.first_index) for part, offset in zip(partitions, offsets, strict=True)]


def report_loss(queue: str, partition: int, start: int, end: int, *, fail: bool) -> None:
    """Raise an error or log a warning: rows [start, end) were trimmed before they were read."""
    lost = (
        f"rows [{start}, {end}) of queue {queue!r}, partition {partition}, were trimmed before they were read"
    )
    if not fail:
        log.warning(
            "continuing without lost rows: %s",
            lost,
            extra={"action": "data_lost", "queue": queue, "partition": partition, "start": start, "end": end},
        )
        return
    raise DataLost(
        f"{lost}: set failOnDataLoss=false to continue without them, or restart from existing rows (seek the "
        "consumer to 'earliest'; a stream also needs a new checkpoint)",
        queue=queue,
        partition=partition,
        start=start,
        end=end,
    )
